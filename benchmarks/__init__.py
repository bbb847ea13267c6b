"""Measurements of Farhand beside its peers; see README.md in this folder."""
