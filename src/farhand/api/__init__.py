"""HTTP and WebSocket: each route parses a request, calls one gateway method and renders the result."""
