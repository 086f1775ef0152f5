"""Calls of dispatch and combine to try, and what every rank gives to them.

A case is small and says all that the ranks must know: each makes every rank's tensors from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tests.moe_routing import Routing, Row

NAN = float("nan")
PAYLOADS: dict[str, tuple[torch.dtype, ...]] = {  # the first has rows of `width`, others are short
    "float64": (torch.float64,),
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "int32": (torch.int32,),
    "fp8_scales": (torch.float8_e4m3fn, torch.float32),
    "fp8_scales_ids": (torch.float8_e5m2, torch.float32, torch.int32),
    "mixed": (torch.uint8, torch.int64, torch.bfloat16, torch.float64),
}
SUMMED = ("float64", "float32", "bfloat16", "float16")
CHOICES = ("random", "distinct", "masked", "duplicates", "one_expert", "local", "remote", "skewed")
TOKENS = ("equal", "ragged", "some_none", "one_rank", "one_token", "none")
MAPS = ("default", "reversed", "round_robin", "random", "one_rank")


@dataclass(frozen=True)
class Case:
    """A dispatch and a combine over its handle.

    tokens, choose, experts: kinds of token counts, of topk_idx and of expert_to_rank. num_tokens:
    the most per rank. static: num_max_tokens_per_rank is given. payload, summed: what dispatch and
    combine carry. width: numbers in a row of the first payload; sum_width: in one of combine's.
    idx_dtype, weight_dtype: None for no weights. bias: None, "row" [...] or "token" [T, ...].
    """

    name: str
    seed: int = 0
    tokens: str = "ragged"
    num_tokens: int = 7
    choose: str = "random"
    topk: int = 2
    num_experts: int = 8
    experts: str = "default"
    layout: str = "expert"
    alignment: int = 1
    zero_padding: bool = False
    static: bool = False
    payload: str = "float32"
    width: int = 5
    idx_dtype: torch.dtype = torch.int64
    weight_dtype: torch.dtype | None = torch.float32
    summed: str = "float32"
    sum_width: int = 5
    sum_weights: bool = True
    bias: str | None = None
    wire_dtype: torch.dtype | None = None
    out: bool = False

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return PAYLOADS[self.payload]


@dataclass(frozen=True)
class Data:
    """A case on R ranks in `servers` servers: what every rank gives."""

    case: Case
    servers: int
    num_ranks: int

    def _rng(self, purpose: str) -> torch.Generator:
        """The same on every rank, in whatever order things are asked for."""
        key = (self.case.seed, self.servers, self.num_ranks, purpose)
        return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))

    @cached_property
    def tokens(self) -> list[int]:
        """T of each rank."""
        most, ranks, kind = self.case.num_tokens, range(self.num_ranks), self.case.tokens
        one = self.case.seed % self.num_ranks
        counts: dict[str, Callable[[int], int]] = {
            "equal": lambda rank: most,
            "ragged": lambda rank: (rank * 3 + self.case.seed) % (most + 1),
            "some_none": lambda rank: most * ((rank + self.case.seed) % 2),
            "one_rank": lambda rank: most * (rank == one),
            "one_token": lambda rank: int(rank == one),
            "none": lambda rank: 0,
        }
        return [counts[kind](rank) for rank in ranks]

    @cached_property
    def expert_to_rank(self) -> list[int] | None:
        experts, ranks = self.case.num_experts, self.num_ranks
        if self.case.experts == "default":
            return None
        placed = {
            "reversed": [(experts - 1 - e) * ranks // experts for e in range(experts)],
            "round_robin": [e % ranks for e in range(experts)],
            "random": torch.randint(ranks, (experts,), generator=self._rng("map")).tolist(),
            "one_rank": [(self.case.seed + 1) % ranks] * experts,
        }
        return [int(rank) for rank in placed[self.case.experts]]

    @cached_property
    def routing(self) -> Routing:
        case = self.case
        topk_idx = [self._choices(rank) for rank in range(self.num_ranks)]
        return Routing(
            self.servers,
            topk_idx,
            case.num_experts,
            self.expert_to_rank,
            case.layout,
            case.alignment,
            case.zero_padding,
            max(self.tokens) if case.static else None,
        )

    def _choices(self, rank: int) -> Tensor:
        """int64 [T, K] of the case's kind; "distinct" and static cases repeat no expert."""
        case, rng = self.case, self._rng(f"topk_idx {rank}")
        shape = (self.tokens[rank], case.topk)
        empty = torch.empty(0, case.topk, dtype=torch.int64)
        routing = Routing(self.servers, [empty] * self.num_ranks, case.num_experts)
        owner = torch.tensor(self.expert_to_rank or routing.owner)
        server = owner // routing.ranks_per_server
        allowed = torch.arange(case.num_experts)
        if case.choose == "local":
            allowed = allowed[owner == rank]
        elif case.choose == "remote":
            allowed = allowed[server != rank // routing.ranks_per_server]
        elif case.choose == "duplicates":
            allowed = torch.tensor([0, case.num_experts - 1])
        elif case.choose == "one_expert":
            allowed = allowed[-1:]
        if case.static or case.choose in ("distinct", "masked"):
            order = torch.rand(shape[0], max(len(allowed), case.topk), generator=rng).argsort(1)
            picks = order[:, : case.topk]  # places past the last expert are masked
        elif case.choose == "skewed":
            heat = 1.0 / torch.arange(1.0, len(allowed) + 1)
            picks = torch.multinomial(
                heat.expand(max(1, shape[0]), -1), shape[1], True, generator=rng
            )
            picks = picks[: shape[0]]
        else:
            picks = torch.randint(max(1, len(allowed)), shape, generator=rng)
        masked = picks >= len(allowed)
        if case.choose == "masked":
            masked = masked | (torch.rand(shape, generator=rng) < 0.4)
            masked[::3] = True  # whole tokens
        padded = torch.cat([allowed, torch.tensor([-1])])
        return padded[torch.where(masked, len(allowed), picks)]

    @cached_property
    def inputs(self) -> list[list[Tensor]]:
        """Per rank the payloads: random bytes, so NaNs and whatever else there is."""
        return self.drawn_inputs("inputs")

    def drawn_inputs(self, purpose: str) -> list[list[Tensor]]:
        """As `inputs`, others for another purpose."""
        rng = self._rng(purpose)
        return [
            [
                _bytes((t, *self.row_shape(i)), dtype, rng)
                for i, dtype in enumerate(self.case.dtypes)
            ]
            for t in self.tokens
        ]

    def row_shape(self, index: int) -> tuple[int, ...]:
        """Shape of a row of a payload: the first is wide, the others are a few numbers or one."""
        return ((self.case.width,), (3,), (), (2, 1))[index]

    @cached_property
    def weights(self) -> list[Tensor] | None:
        """Per rank topk_weights, NaN where topk_idx is -1."""
        if self.case.weight_dtype is None:
            return None
        drawn, rng = [], self._rng("weights")
        for idx in self.routing.topk_idx:
            given = torch.rand(idx.shape, generator=rng, dtype=self.case.weight_dtype)
            drawn.append(given.masked_fill(idx < 0, NAN))
        return drawn

    @cached_property
    def expert_outs(self) -> list[Tensor]:
        """Per rank rows [rows, sum_width] of many magnitudes; NaN in padding."""
        return self.drawn_outs("expert_outs")

    def drawn_outs(self, purpose: str) -> list[Tensor]:
        """As `expert_outs`, others for another purpose."""
        dtype, width, rng = self.sum_dtype, self.case.sum_width, self._rng(purpose)
        return [_numbers((len(rows), width), dtype, rng, rows) for rows in self.all_rows]

    @property
    def sum_dtype(self) -> torch.dtype:
        return PAYLOADS[self.case.summed][0]

    @cached_property
    def row_weights(self) -> list[Tensor] | None:
        """Per rank combine's weights [rows], NaN in padding."""
        if not self.case.sum_weights:
            return None
        rng = self._rng("row_weights")
        dtype = torch.float64 if self.sum_dtype == torch.float64 else torch.float32
        return [_numbers((len(rows),), dtype, rng, rows) for rows in self.all_rows]

    @cached_property
    def biases(self) -> list[Tensor] | None:
        """Per rank combine's bias, [T, sum_width] or [sum_width]."""
        if self.case.bias is None:
            return None
        rng, width = self._rng("biases"), self.case.sum_width
        shapes = [(t, width) if self.case.bias == "token" else (width,) for t in self.tokens]
        return [_numbers(shape, self.sum_dtype, rng) for shape in shapes]

    @cached_property
    def all_rows(self) -> list[list[Row | None]]:
        return [self.routing.rows(rank) for rank in range(self.num_ranks)]


def _bytes(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    drawn = torch.randint(256, (size,), dtype=torch.uint8, generator=rng)
    return drawn.view(dtype).view(shape)


def _numbers(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rng: torch.Generator,
    rows: list[Row | None] | None = None,
) -> Tensor:
    """Normal numbers times 2^-6 to 2^6, so that the order of a sum shows; NaN in padding rows.

    Some are -0, which stays -0 unless a sum starts with 0.
    """
    drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
    drawn *= 2.0 ** torch.randint(-6, 7, shape, generator=rng)
    drawn[torch.rand(shape, generator=rng) < 0.2] = -0.0
    if rows is not None:
        drawn[torch.tensor([row is None for row in rows], dtype=torch.bool)] = NAN
    return drawn.to(dtype)
