"""Tool calls: resolution, policy, recording, execution and their ends."""
