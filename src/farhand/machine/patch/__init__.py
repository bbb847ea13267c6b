"""Patches that change several files, all or none."""
