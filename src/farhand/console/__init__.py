"""The web console. It uses only the public HTTP interface."""
