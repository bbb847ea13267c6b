"""Commands and terminals on other machines, as with ssh."""
