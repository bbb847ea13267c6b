"""The hub: the gate every call passes, the roster of nodes, credentials and the journal."""
