"""Searching files by content (grep) and by name (glob)."""
