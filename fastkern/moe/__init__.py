"""Mixture-of-experts dispatch and combine."""
