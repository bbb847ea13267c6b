"""Copies of the installed Farhand for other machines: a wheel, and one file that runs a node."""
