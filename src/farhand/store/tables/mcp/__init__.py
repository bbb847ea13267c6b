"""Tables of MCP: servers behind the gate, and tasks of clients."""
