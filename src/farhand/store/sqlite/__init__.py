"""The SQLite engine: one writer, group commit, migrations, copies and archives."""
