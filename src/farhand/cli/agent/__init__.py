"""Commands about the agent: chat, sessions, schedules, memory, skills and channels."""
