"""Storage: the journal, tables, objects and the bus. It stores and finds, and decides nothing."""
