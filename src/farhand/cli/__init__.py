"""The farhand command: thin clients of the HTTP interface, plus up, gateway and node."""
