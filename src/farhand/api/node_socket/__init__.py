"""The WebSocket that nodes connect to."""
