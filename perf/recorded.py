"""Recorded routing: what `fastkern train-demo --record FILE` wrote, as calls to measure with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perf.workloads import Routing

KEYS = ("topk_idx", "num_experts", "source")


@dataclass(frozen=True)
class Recorded:
    """Routing of a model. topk_idx: int32 [steps, layers, ranks, tokens, K], -1 for none.

    num_experts: E. source: what the text was.
    """

    topk_idx: npt.NDArray[np.int32]
    num_experts: int
    source: str

    @property
    def num_steps(self) -> int:
        """Recorded steps."""
        return int(self.topk_idx.shape[0])

    @property
    def num_layers(self) -> int:
        """Recorded MoE layers."""
        return int(self.topk_idx.shape[1])

    @property
    def top_k(self) -> int:
        """Choices of a token."""
        return int(self.topk_idx.shape[4])

    def call(
        self,
        step: int,
        layer: int,
        num_ranks: int | None = None,
        num_tokens: int | None = None,
        top_k: int | None = None,
    ) -> Routing:
        """One layer's routing at one step: int64 [tokens, top_k] per rank.

        num_ranks: where it differs from the recorded ranks, their tokens are cut anew, in order,
        into as equal parts as can be. num_tokens: the most of a rank, its first. top_k: the first
        choices of each token only. Raises ValueError for more choices than were recorded.
        """
        ids = self.topk_idx[step, layer].astype(np.int64)
        if top_k is not None and top_k > self.top_k:
            raise ValueError(f"top-{self.top_k} was recorded, not top-{top_k}")
        per_rank = list(ids)
        if num_ranks is not None and num_ranks != len(per_rank):
            per_rank = np.array_split(ids.reshape(-1, self.top_k), num_ranks)
        return [np.ascontiguousarray(r[:num_tokens, :top_k]) for r in per_rank]


def read_recorded(path: Path) -> Recorded:
    """The file's content. Raises ValueError naming what is wrong with it, OSError if not there."""
    with np.load(path, allow_pickle=False) as file:
        if missing := [key for key in KEYS if key not in file]:
            raise ValueError(f"{path}: no {', '.join(missing)}; not a file of recorded routing")
        topk_idx, num_experts, source = (file[key] for key in KEYS)
    if topk_idx.ndim != 5 or topk_idx.dtype.kind != "i":
        raise ValueError(
            f"{path}: topk_idx must be integers [steps, layers, ranks, tokens, K], "
            f"not {topk_idx.dtype} {list(topk_idx.shape)}"
        )
    experts = int(num_experts)
    if topk_idx.size and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < experts:
        raise ValueError(
            f"{path}: topk_idx holds {int(topk_idx.min())} to {int(topk_idx.max())}, "
            f"with {experts} experts"
        )
    return Recorded(topk_idx.astype(np.int32), experts, str(source))


def write_recorded(path: Path, recorded: Recorded) -> None:
    """Write such a file."""
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            topk_idx=recorded.topk_idx,
            num_experts=np.int64(recorded.num_experts),
            source=np.str_(recorded.source),
        )
