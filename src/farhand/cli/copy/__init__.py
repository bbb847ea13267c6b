"""The cp command."""
