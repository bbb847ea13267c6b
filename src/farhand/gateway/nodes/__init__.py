"""Manage the known nodes, how they join, and queries to them."""
