"""MCP servers behind the gate: their connections, tools, accepted descriptions and logins."""
