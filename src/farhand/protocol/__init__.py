"""The nouns that cross a process border, and their codec. Pure: no sockets, no clocks, no files."""
