"""The agent: functions over messages that yield events. Nothing here saves, listens or knows a node."""
