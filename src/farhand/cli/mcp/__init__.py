"""Commands of `farhand mcp`."""
