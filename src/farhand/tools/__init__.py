"""The `Tool` contract, the schema of a typed function, and the tool families that only need a machine."""
