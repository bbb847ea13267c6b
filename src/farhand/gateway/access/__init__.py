"""Credentials, scopes and principals."""
