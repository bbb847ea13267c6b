"""Terminals over HTTP: their routes, and the WebSocket with their output and input."""
