"""The long-running commands: up, gateway, node and join."""
