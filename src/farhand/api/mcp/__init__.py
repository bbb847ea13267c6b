"""MCP: the server on /mcp, and the routes that manage MCP servers behind the gate."""
