"""The journal: events in order, each group sealed with a keyed hash."""
