"""How the demos say that something went wrong."""

from __future__ import annotations


class DemoError(Exception):
    """A reason to stop that is told to the user in one line: a difference, a lost rank, bad input.

    details: more lines, a rank's traceback for instance, shown when asked for.
    """

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details
