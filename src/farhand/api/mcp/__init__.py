"""The MCP server on /mcp."""
