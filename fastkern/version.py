"""The version; part of what ranks must agree on."""

__version__ = "0.1.0"
