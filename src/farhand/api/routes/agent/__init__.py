"""Routes of the agent: sessions, schedules, channels, memory and workspace."""
