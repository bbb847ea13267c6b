"""OAuth 2.1 for `/mcp`: metadata, registration, consent and tokens."""
