"""Jobs, their slots, the scheduler and heartbeats."""
