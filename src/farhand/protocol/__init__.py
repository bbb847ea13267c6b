"""Types that cross a process boundary and their codecs. Pure: no sockets, clocks or files."""
