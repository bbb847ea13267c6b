"""The web page. It speaks only the public HTTP interface."""
