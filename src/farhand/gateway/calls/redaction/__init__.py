"""Redaction of what leaves the gateway in parts: excerpts and the output of commands."""
