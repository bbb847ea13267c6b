"""Commands for running a gateway: tokens, settings, checks, backups."""
