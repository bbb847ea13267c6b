"""Agents' files over the object store, native file tools and skills."""
