"""Several gateways that serve together: connections of nodes, shared state, and the work of a lost gateway."""
