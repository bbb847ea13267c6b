"""One plug-in of each kind for a Farhand gateway."""
