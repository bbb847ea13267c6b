"""Assembly of the gateway process: the only package that knows all others."""
