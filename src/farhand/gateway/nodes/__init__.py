"""Which nodes there are, how they join, and queries to them."""
