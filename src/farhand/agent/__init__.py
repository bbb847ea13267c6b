"""The agent: functions over messages that yield events. This package has no storage, no sockets and no nodes."""
