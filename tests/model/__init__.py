"""Random-schedule model of the exchange protocol, and its tests."""
