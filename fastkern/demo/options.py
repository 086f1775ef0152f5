"""What the demos are asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import DemoError
from .model import ModelSizes


@dataclass(frozen=True)
class CommonOptions:
    """What both demos take; see their --help.

    text: file to read, None for Python's own sources. experts: 0 for two per rank. hidden: floats
    in a row. top_k: experts of a token. steps: of training. timeout_s: for the ranks.
    """

    servers: int = 2
    ranks_per_server: int = 4
    text: Path | None = None
    experts: int = 0
    top_k: int = 2
    tokens_per_rank: int = 128
    hidden: int = 64
    steps: int = 60
    seed: int = 0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name, least in self._least().items():
            if getattr(self, name) < least:
                raise DemoError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.top_k > min(self.num_experts, 32):
            raise DemoError(
                f"top_k must be at most 32 and the {self.num_experts} experts, not {self.top_k}"
            )

    def _least(self) -> dict[str, int]:
        ones = dict.fromkeys(("servers", "ranks_per_server", "hidden", "top_k"), 1)
        return ones | dict.fromkeys(("experts", "tokens_per_rank", "steps"), 0)

    @property
    def num_ranks(self) -> int:
        """Ranks of all servers."""
        return self.servers * self.ranks_per_server

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.experts or 2 * self.num_ranks

    @property
    def source(self) -> str:
        """What the text is."""
        return "Python's standard library" if self.text is None else str(self.text)


@dataclass(frozen=True)
class Options(CommonOptions):
    """Sizes of `fastkern demo`. repeats: timed runs, after one more."""

    top_k: int = 4
    tokens_per_rank: int = 2048
    hidden: int = 256
    steps: int = 200
    repeats: int = 5
    shaped: bool = False

    def _least(self) -> dict[str, int]:
        return super()._least() | {"repeats": 1}

    @property
    def sizes(self) -> ModelSizes:
        """Of the model: one layer, with experts no wider than a token."""
        return ModelSizes(1, self.hidden, self.hidden, self.num_experts, self.top_k)


@dataclass(frozen=True)
class TrainOptions(CommonOptions):
    """Sizes of `fastkern train-demo`. dtype: of weights and rows. record: file for the routing."""

    layers: int = 3
    dtype: str = "float64"
    record: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("float32", "float64"):
            raise DemoError(f"dtype must be float32 or float64, not {self.dtype}")

    def _least(self) -> dict[str, int]:
        return super()._least() | {"layers": 1, "steps": 1, "tokens_per_rank": 1}

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row."""
        return self.hidden * (4 if self.dtype == "float32" else 8)

    @property
    def sizes(self) -> ModelSizes:
        """Of the model: experts twice as wide inside as a token."""
        return ModelSizes(self.layers, self.hidden, 2 * self.hidden, self.num_experts, self.top_k)
