"""The node program: lends this machine to a gateway."""
