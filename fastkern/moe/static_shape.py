"""What all calls of a static exchange have in common, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..planner import Topology
from ..tensors import dtype_name
from .dispatch_arguments import DispatchCall, DispatchOptions, RowFormat, check_options
from .handle import MOST_CHOICES, MOST_PARTS, MetaInfo
from .placement import Placement
from .sizes import worst_case_rows
from .tensor_checks import VALUE_KINDS, aligned_row, check_row_size, num_values

PLANNERS = ("device", "host")


@dataclass(frozen=True)
class Reverse:
    """A call that a backward makes: the same routes with rows of another size.

    op: "dispatch" or "combine". row_bytes: of a row between servers. partial_row_bytes: of a rank's
    sum inside a server, in a combine.
    """

    name: str
    op: str
    row_bytes: int
    partial_row_bytes: int = 0


@dataclass(frozen=True)
class StaticShape:
    """Equal on all ranks.

    options: with num_max_tokens_per_rank, C. topk: K. row_shapes, dtypes: of each payload's rows.
    weights_dtype: of topk_weights, None without. expert_shape, expert_dtype, wire_dtype: of the
    rows that are combined; dtypes None without a combine. planner: "device" or "host".
    gradients: calls can be differentiated.
    """

    options: DispatchOptions
    topk: int
    row_shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    weights_dtype: torch.dtype | None
    expert_shape: tuple[int, ...]
    expert_dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    planner: str
    gradients: bool = False

    @property
    def num_max_tokens(self) -> int:
        """C, the most tokens of a rank."""
        limit = self.options.num_max_tokens_per_rank
        assert limit is not None
        return limit

    @property
    def format(self) -> RowFormat:
        """The row that moves."""
        sizes = [
            num_values(shape) * dtype.itemsize
            for shape, dtype in zip(self.row_shapes, self.dtypes, strict=True)
        ]
        weight_bytes = 0 if self.weights_dtype is None else self.weights_dtype.itemsize
        return RowFormat.of(sizes, weight_bytes, self.topk)

    @property
    def has_combine(self) -> bool:
        """Whether anything is combined, in a backward at least."""
        return self.expert_dtype is not None or bool(self._summed)

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a combined row between servers; 0 without a combine."""
        if self.wire_dtype is None:
            return self._summed[0].row_bytes if self._summed else 0
        return aligned_row(num_values(self.expert_shape) * self.wire_dtype.itemsize)

    @property
    def partial_row_bytes(self) -> int:
        """Bytes of a rank's sum inside a server; 0 without a combine."""
        if self.expert_dtype is None:
            return self._summed[0].partial_row_bytes if self._summed else 0
        return aligned_row(num_values(self.expert_shape) * sum_dtype(self.expert_dtype).itemsize)

    @property
    def _summed(self) -> list[Reverse]:
        """Backward of a dispatch: a payload's gradients, or those of the weights."""
        if not self.gradients:
            return []
        rows = [
            (f"gradient {p}", num_values(row), dtype)
            for p, (row, dtype) in enumerate(zip(self.row_shapes, self.dtypes, strict=True))
            if dtype in VALUE_KINDS
        ]
        if self.weights_dtype is not None:
            rows.append(("gradient weights", self.topk, self.weights_dtype))
        return [
            Reverse(
                name,
                "combine",
                aligned_row(width * dtype.itemsize),
                aligned_row(width * sum_dtype(dtype).itemsize),
            )
            for name, width, dtype in rows
        ]

    @property
    def reverses(self) -> list[Reverse]:
        """All that backwards make."""
        if not self.gradients or self.expert_dtype is None:
            return self._summed
        return [*self._summed, Reverse("gradient combined", "dispatch", self.again.row_bytes)]

    @property
    def again(self) -> RowFormat:
        """Of the gradients of combined rows, which go where the tokens went."""
        assert self.expert_dtype is not None
        size = num_values(self.expert_shape) * self.expert_dtype.itemsize
        return RowFormat.of([size], 0, self.topk)

    @property
    def most_combine_bytes(self) -> tuple[int, int]:
        """The largest row between servers, and the largest sum, of any combine."""
        sizes = [(self.combine_row_bytes, self.partial_row_bytes)]
        sizes += [(r.row_bytes, r.partial_row_bytes) for r in self._summed]
        return max(row for row, _ in sizes), max(partial for _, partial in sizes)

    @property
    def most_dispatch_bytes(self) -> int:
        """The largest row of any dispatch."""
        sizes = [r.row_bytes for r in self.reverses if r.op == "dispatch"]
        return max(self.format.row_bytes, *sizes, 0)

    def placement(self, num_ranks: int) -> Placement:
        """Which rank owns which expert."""
        return Placement(self.options.num_experts, num_ranks, self.options.expert_to_rank)

    def most_rows(self, num_ranks: int) -> list[int]:
        """[R] rows of each rank's output: the worst case."""
        o = self.options
        return [
            worst_case_rows(
                num_ranks, self.num_max_tokens, self.topk, int(own), o.expert_alignment, o.layout
            )
            for own in self.placement(num_ranks).num_owned
        ]

    def info(self, rank: int, topology: Topology, num_tokens: int) -> MetaInfo:
        """What a handle would say of a call with so many tokens on this rank."""
        own = int(self.placement(topology.num_ranks).num_owned[rank])
        return MetaInfo(
            serial=0,
            rank=rank,
            num_ranks=topology.num_ranks,
            servers=topology.servers,
            num_tokens=num_tokens,
            topk=self.topk,
            num_experts=self.options.num_experts,
            num_own_experts=own,
            layout=self.options.layout,
            num_recv_rows=self.most_rows(topology.num_ranks)[rank],
            window_rows=topology.num_ranks * self.num_max_tokens,
            alignment=self.options.expert_alignment,
            num_max_tokens=self.num_max_tokens,
        )

    def agreement(self) -> str:
        """All that the ranks must have in common, as text."""
        names = [dtype_name(d) for d in self.dtypes]
        o, weights, expert, wire = self.options, "none", "none", "none"
        if self.weights_dtype is not None:
            weights = dtype_name(self.weights_dtype)
        if self.expert_dtype is not None and self.wire_dtype is not None:
            expert, wire = dtype_name(self.expert_dtype), dtype_name(self.wire_dtype)
        text = (
            f"static exchange planned on the {self.planner}: rows "
            f"{[list(s) for s in self.row_shapes]} of {names}, top {self.topk}, weights {weights}, "
            f"{o.num_experts} experts, {o.layout} layout, alignment {o.expert_alignment}, at most "
            f"{self.num_max_tokens} tokens per rank, combined rows {list(self.expert_shape)} of "
            f"{expert}, {wire} between servers, gradients: {self.gradients}"
        )
        if o.expert_to_rank is not None:
            text += f", expert_to_rank {list(o.expert_to_rank)}"
        return text

    def check_dispatch(self, call: DispatchCall) -> None:
        """Raise TypeError or ValueError where a call's tensors are not those of this exchange."""
        shapes = tuple(tuple(x.shape[1:]) for x in call.xs)
        if shapes != self.row_shapes:
            raise ValueError(
                f"x has rows {[list(s) for s in shapes]}, the exchange was made for "
                f"{[list(s) for s in self.row_shapes]}"
            )
        dtypes = tuple(x.dtype for x in call.xs)
        if dtypes != self.dtypes:
            raise TypeError(
                f"x is {[dtype_name(d) for d in dtypes]}, the exchange was made for "
                f"{[dtype_name(d) for d in self.dtypes]}"
            )
        if call.topk != self.topk:
            raise ValueError(f"topk_idx has {call.topk} choices, the exchange has {self.topk}")
        given = None if call.weights is None else call.weights.dtype
        if given != self.weights_dtype:
            raise TypeError(f"topk_weights is {given}, the exchange has {self.weights_dtype}")

    def check_combine(self, expert_out: Any) -> None:
        """Raise TypeError or ValueError where rows are not those that this exchange combines."""
        if not isinstance(expert_out, torch.Tensor):
            raise TypeError(f"expert_out must be a tensor, not {type(expert_out).__name__}")
        if self.expert_dtype is None:
            raise ValueError("the exchange was made without a combine: expert_out was not given")
        if expert_out.dtype != self.expert_dtype:
            raise TypeError(
                f"expert_out is {dtype_name(expert_out.dtype)}, the exchange combines "
                f"{dtype_name(self.expert_dtype)}"
            )
        if tuple(expert_out.shape[1:]) != self.expert_shape:
            raise ValueError(
                f"expert_out has rows {list(expert_out.shape[1:])}, the exchange combines "
                f"{list(self.expert_shape)}"
            )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which values of a dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_static_shape(
    xs: Sequence[Any],
    topk: int,
    weights_dtype: torch.dtype | None,
    expert_out: Any,
    wire_dtype: torch.dtype | None,
    options: DispatchOptions,
    planner: str,
    num_ranks: int,
    gradients: bool = False,
) -> StaticShape:
    """Check the arguments of a static exchange; raises TypeError or ValueError naming one.

    xs, expert_out: tensors like those of the calls, of any number of rows; the latter may be None.
    """
    if planner not in PLANNERS:
        raise ValueError(f'planner must be "device" or "host", not {planner!r}')
    if not 1 <= len(xs) <= MOST_PARTS:
        raise ValueError(f"x: {len(xs)} tensors; 1 to {MOST_PARTS} travel together")
    for name, x in [*((f"x[{k}]", x) for k, x in enumerate(xs)), ("expert_out", expert_out)]:
        if x is None and name == "expert_out":
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.dim() == 0:
            raise ValueError(f"{name} has no dimension to hold rows")
    if isinstance(topk, bool) or not hasattr(topk, "__index__"):
        raise TypeError(f"topk must be a whole number, not {topk!r}")
    if not 1 <= topk <= MOST_CHOICES:
        raise ValueError(f"topk must be 1 to {MOST_CHOICES}, not {topk}")
    if weights_dtype not in (None, torch.float32, torch.float64):
        raise TypeError(f"weights_dtype must be float32, float64 or None, not {weights_dtype}")
    check_options(options, num_ranks)
    if not options.num_max_tokens_per_rank:
        raise ValueError("num_max_tokens_per_rank must be given, and at least 1")
    if options.num_max_tokens_per_rank * topk > (1 << 32) - 2:
        raise ValueError("num_max_tokens_per_rank * topk must be less than 2^32 - 1")
    expert_dtype, wire = None, None
    if expert_out is not None:
        expert_dtype = expert_out.dtype
        if expert_dtype not in VALUE_KINDS:
            raise TypeError(
                "expert_out must be float64, float32, bfloat16 or float16, "
                f"not {dtype_name(expert_dtype)}"
            )
        sums = sum_dtype(expert_dtype)
        wire = wire_dtype or expert_dtype
        if wire not in (expert_dtype, sums):
            raise TypeError(f"wire_dtype must be {expert_dtype} or {sums}, not {wire}")
    elif wire_dtype is not None:
        raise ValueError("wire_dtype is of a combine: expert_out was not given")
    shape = StaticShape(
        options,
        int(topk),
        tuple(tuple(x.shape[1:]) for x in xs),
        tuple(x.dtype for x in xs),
        weights_dtype,
        () if expert_out is None else tuple(expert_out.shape[1:]),
        expert_dtype,
        wire,
        planner,
        bool(gradients),
    )
    for size in (shape.most_dispatch_bytes, *shape.most_combine_bytes):
        check_row_size(size)
    most = max(*shape.most_rows(num_ranks), num_ranks * shape.num_max_tokens)
    if most >= (1 << 32) - 1:
        raise ValueError(f"up to {most} rows on one rank, more than 2^32 - 2")
    return shape
