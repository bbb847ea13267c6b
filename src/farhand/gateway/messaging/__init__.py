"""Channels: inbound messages, the outbox and hooks."""
