"""Configuring and installing: setup, service, upgrade and uninstall."""
