"""Tokens, OAuth clients, secrets, sign-ins and pairings."""
