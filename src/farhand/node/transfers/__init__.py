"""This node's ends of file transfers."""
