"""One module per table: its row types and its statements."""
