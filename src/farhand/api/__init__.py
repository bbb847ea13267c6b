"""Doors: each route parses, calls one method of the hub, renders."""
