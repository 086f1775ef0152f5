"""What the demo is asked to do, and how it says that something went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class DemoError(Exception):
    """A reason to stop that is told to the user in one line: a difference, a lost rank, bad input.

    details: more lines, a rank's traceback for instance, shown when asked for.
    """

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


@dataclass(frozen=True)
class Options:
    """Sizes of the demo; see `fastkern demo --help`.

    text: file to read, None for Python's own sources. experts: 0 for two per rank. hidden: floats
    in a row. steps: of training. repeats: timed runs, after one more. timeout_s: for the ranks.
    """

    servers: int = 2
    ranks_per_server: int = 4
    text: Path | None = None
    experts: int = 0
    tokens_per_rank: int = 2048
    hidden: int = 256
    steps: int = 200
    repeats: int = 5
    seed: int = 0
    shaped: bool = False
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("servers", "ranks_per_server", "hidden", "repeats"):
            if getattr(self, name) < 1:
                raise DemoError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("experts", "tokens_per_rank", "steps"):
            if getattr(self, name) < 0:
                raise DemoError(f"{name} must not be negative, and is {getattr(self, name)}")
        if self.num_experts < 2:
            raise DemoError(f"a top-2 layer has at least 2 experts, not {self.num_experts}")

    @property
    def num_ranks(self) -> int:
        """Ranks of all servers."""
        return self.servers * self.ranks_per_server

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return self.experts or 2 * self.num_ranks
