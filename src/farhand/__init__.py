"""Farhand: a self-hosted gateway that gives an AI agent hands on every machine you own."""

__version__ = "0.2.0"
