"""Channels: one file per chat service."""
