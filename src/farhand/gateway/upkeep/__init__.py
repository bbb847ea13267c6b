"""Periodic tasks: backups, retention and token use."""
