"""Plugs for frameworks: each module here works without its framework until it is switched on."""
