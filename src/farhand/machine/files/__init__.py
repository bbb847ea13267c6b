"""Files confined to allowed roots: reading, listing, atomic changes and undo."""
