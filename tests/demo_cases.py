"""The demo's layer on ranks and in one process, without the training and the timing around it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import fastkern
from fastkern.demo.copies import combine_copies, dispatch_copies
from fastkern.demo.layer import Spread, Whole, run_spread, run_whole
from fastkern.demo.results import RankResult
from fastkern.moe.placement import Placement
from fastkern.nn import ExpertParallelMoE

HIDDEN = 24


@dataclass(frozen=True)
class LayerCase:
    """A skewed layer. num_tokens: of each rank."""

    servers: int
    num_experts: int
    top_k: int
    num_tokens: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def placement(self) -> Placement:
        return Placement(self.num_experts, self.num_ranks)

    def layer(self) -> ExpertParallelMoE:
        """Whole, of the same weights in every process."""
        torch.manual_seed(self.num_experts)
        made = ExpertParallelMoE(HIDDEN, HIDDEN, self.num_experts, self.top_k)
        with torch.no_grad():
            made.gate.scores.weight += 0.3 * torch.randn(self.num_experts, 1)
        return made

    def tokens(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(self.num_tokens[rank], HIDDEN, generator=generator) + 0.5

    def wholes(self) -> list[Whole]:
        """Each rank's part, computed in one process."""
        ranks = range(self.num_ranks)
        with torch.no_grad():
            return run_whole(
                self.layer(), [self.tokens(rank) for rank in ranks], self.servers, self.placement
            )


LAYER_CASES = [
    LayerCase(2, 8, 2, (50, 50, 50, 50)),
    LayerCase(2, 7, 3, (40, 0, 33, 1)),  # unequal ownership, a rank without tokens
    LayerCase(4, 2, 2, (9, 30, 1, 17)),  # ranks without experts
    LayerCase(1, 3, 1, (60, 1, 1, 1)),
    LayerCase(2, 4, 2, (0, 0, 0, 0)),
    LayerCase(2, 40, 4, (3, 2, 0, 1)),  # experts without rows
]


def as_result(part: Spread | Whole, stats: object = None) -> RankResult:
    return RankResult(
        part.topk_idx.clone(),
        part.topk_weights.clone(),
        part.received.clone(),
        part.received_weights.clone(),
        part.output.clone(),
        stats,
        {},
        {},
    )


@torch.no_grad()
def run_layer(rank: int, num_ranks: int, case: LayerCase) -> RankResult:
    """A rank's forward by dispatch and combine."""
    layer = ExpertParallelMoE.from_whole(case.layer(), fastkern.init(servers=case.servers))
    spread = run_spread(layer, case.tokens(rank))
    return as_result(spread, spread.handle.stats)


@torch.no_grad()
def run_copies(rank: int, num_ranks: int, case: LayerCase) -> list[tuple[Tensor, Tensor]]:
    """(received, output) with a copy per choice: by gloo, and by fastkern."""
    comm = fastkern.init(servers=case.servers)
    layer, x = ExpertParallelMoE.from_whole(case.layer(), comm), case.tokens(rank)
    idx, weights = layer.gate(x)
    found = []
    for all_to_all in (dist.all_to_all_single, comm.all_to_all_single):
        received, sent = dispatch_copies(all_to_all, x, idx, case.placement, rank)
        own = case.placement.experts_of(rank)
        counts = torch.zeros(case.num_experts, dtype=torch.int64)
        dist.all_reduce(counts.index_add_(0, idx.flatten(), torch.ones_like(idx.flatten())))
        computed = layer.run_experts(received, [int(counts[e]) for e in own])
        found.append((received, combine_copies(all_to_all, computed, sent, weights)))
    return found


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The installed `fastkern` command."""
    script = Path(sysconfig.get_path("scripts")) / "fastkern"
    return subprocess.run(
        [script, *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **env},
        check=False,
    )


def words_missing(text: str, words: Sequence[str]) -> list[str]:
    """Of the words, those that the text does not have; lines may be broken anywhere."""
    flat = " ".join(text.split())
    return [word for word in words if word not in flat]
