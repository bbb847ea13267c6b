"""Tools: what one is, and the families that need only a machine."""
