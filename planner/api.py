"""Planning: from a traffic matrix to puts, a bound and one stage table per rank."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from . import _core
from .table import StageTable

Policy = Literal["auto", "whole", "split", "direct", "spreadout"]

POLICY_NAMES = ("whole", "split", "direct", "spreadout", "auto")
_POLICY_INDEX = {name: k for k, name in enumerate(POLICY_NAMES)}
assert set(_POLICY_INDEX) == set(get_args(Policy))

DEFAULT_CHUNK_BYTES = 128 * 1024
DEFAULT_CHUNK_SLOTS = 64
DEFAULT_CREDIT_LEAD = 1


@dataclass(frozen=True)
class Topology:
    """N servers of M ranks, and what moving a byte costs.

    servers: N, at least 1.
    gpus_per_server: M, at least 1. Rank r is server r // M, local rank r % M.
    scale_up_GBps: bandwidth per rank inside a server, 1e9 bytes per second.
    scale_out_GBps: bandwidth per rank between servers, 1e9 bytes per second.
    alpha_us: fixed cost of one put, microseconds.
    scale_up: "switch" (any rank at full rate to any other) or "mesh" (a link of
        scale_up_GBps / (M - 1) to each local peer, as on MI300X).
    cross_rail: a rank can put to any rank of another server. False: only to its same-index peer;
        then all-to-alls are never sent directly between servers.

    Raises ValueError naming the argument. Costs are rounded to whole picoseconds per KiB here and
    nowhere else: ranks that were given the same numbers make the same plans.
    """

    servers: int
    gpus_per_server: int
    scale_up_GBps: float = 450.0  # noqa: N815 (the unit's own spelling)
    scale_out_GBps: float = 50.0  # noqa: N815
    alpha_us: float = 5.0
    scale_up: Literal["switch", "mesh"] = "switch"
    cross_rail: bool = True
    _core: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("servers", "gpus_per_server"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"Topology: {name} must be a whole number of at least 1, not {value!r}"
                )
        if self.num_ranks >= 1 << 16:
            raise ValueError(f"Topology: {self.num_ranks} ranks; at most 65535 are supported")
        for name in ("scale_up_GBps", "scale_out_GBps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 1e-6 <= value <= 1e5):
                raise ValueError(f"Topology: {name} must be between 1e-6 and 1e5, not {value!r}")
        if not (math.isfinite(self.alpha_us) and 0 <= self.alpha_us <= 1e6):
            raise ValueError(f"Topology: alpha_us must be between 0 and 1e6, not {self.alpha_us!r}")
        if self.scale_up not in ("switch", "mesh"):
            raise ValueError(
                f"Topology: scale_up must be 'switch' or 'mesh', not {self.scale_up!r}"
            )
        core = _core.Topology(
            int(self.servers),
            int(self.gpus_per_server),
            float(self.scale_up_GBps),
            float(self.scale_out_GBps),
            float(self.alpha_us),
            self.scale_up == "mesh",
            bool(self.cross_rail),
        )
        object.__setattr__(self, "_core", core)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its arguments; the quantised costs are made anew."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    @property
    def num_ranks(self) -> int:
        """R = N * M."""
        return int(self.servers) * int(self.gpus_per_server)


class Plan:
    """The order of puts for one traffic matrix; the same on every rank that plans it."""

    __slots__ = ("_core", "topology")

    def __init__(self, core: Any, topology: Topology) -> None:
        self._core = core
        self.topology = topology

    @property
    def policy(self) -> str:
        """What was planned: "whole", "split", "direct" or "spreadout"; `why` tells the choice."""
        return str(self._core.policy)

    @property
    def why(self) -> list[str]:
        """The alternatives that were weighed, a line each."""
        return list(self._core.why)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self._core.row_bytes)

    @property
    def bound_rows(self) -> int:
        """The most rows that any rank sends or receives over scale-out after balancing."""
        return int(self._core.bound_rows)

    @property
    def completion_rows(self) -> int:
        """Rows in sequence on scale-out alone, at zero alpha.

        spreadout: the sum of its stage maxima, as published. Others: a replay of the orders, each
        put starting when its sender's and its receiver's previous puts have ended.
        """
        return int(self._core.completion_rows)

    @property
    def max_puts_per_rank(self) -> int:
        """The most puts of any rank."""
        return int(self._core.max_puts_per_rank)

    @property
    def hash(self) -> int:
        """64-bit hash of traffic, topology, options and policy: equal on ranks that agree."""
        return int(self._core.hash)

    @property
    def scale_up_rows(self) -> tuple[int, int, int]:
        """Most rows out of a rank, into a rank, and between two ranks, inside a server."""
        return tuple(self._core.scale_up_rows)

    @property
    def bound_us(self) -> float:
        """Lower bound of the call in microseconds: the larger of scale-out and scale-up."""
        scale_out = self.bound_rows * self.row_bytes / (self.topology.scale_out_GBps * 1e3)
        most_out, most_in, most_link = self.scale_up_rows
        rows = max(most_out, most_in)
        if self.topology.scale_up == "mesh":
            rows = max(rows, most_link * (self.topology.gpus_per_server - 1))
        return max(scale_out, rows * self.row_bytes / (self.topology.scale_up_GBps * 1e3))

    def puts(self, rank: int) -> list[tuple[int, int]]:
        """This rank's puts in order as (peer, rows); puts of no rows are left out."""
        self._check_rank(rank)
        return list(self._core.puts(rank))

    def table(self, rank: int) -> StageTable:
        """This rank's stage table: its bytes and NumPy views of them."""
        self._check_rank(rank)
        return StageTable(self._core.table_bytes(rank))

    def validate(self) -> None:
        """Lower every rank and check the tables; raises RuntimeError listing the faults found."""
        faults = self._core.validate()
        if faults:
            raise RuntimeError("the plan is not valid:\n  " + "\n  ".join(faults))

    def to_json(self) -> str:
        """The plan as one JSON object: figures, and each rank's puts."""
        return json.dumps(
            {
                "servers": int(self.topology.servers),
                "gpus_per_server": int(self.topology.gpus_per_server),
                "row_bytes": self.row_bytes,
                "policy": self.policy,
                "why": self.why,
                "hash": f"{self.hash:016x}",
                "bound_rows": self.bound_rows,
                "completion_rows": self.completion_rows,
                "max_puts_per_rank": self.max_puts_per_rank,
                "puts": [
                    [{"peer": peer, "rows": rows} for peer, rows in self.puts(rank)]
                    for rank in range(self.topology.num_ranks)
                ],
            }
        )

    def describe(self) -> str:
        """A few readable lines: policy, puts, bound and share of the bound."""
        t = self.topology
        bound, completion = self.bound_rows, self.completion_rows
        share = f"{bound / completion:.1%}" if completion else "nothing to send"
        lines = [
            f"{t.servers} servers x {t.gpus_per_server} ranks, rows of {self.row_bytes} bytes",
            f"policy {self.policy}, at most {self.max_puts_per_rank} puts per rank",
            f"scale-out: {completion} rows in sequence, bound {bound} ({share} of the bound)",
            f"bound with scale-up: {self.bound_us:.1f} us",
        ]
        return "\n".join(lines + [f"  {line}" for line in self.why])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.topology.num_ranks:
            raise ValueError(
                f"rank {rank} is not one of the plan's {self.topology.num_ranks} ranks"
            )


class MoePlan(Plan):
    """The plan of a dispatch, and of the combine that follows it; see `plan_moe`."""

    __slots__ = ()

    def combine_table(
        self,
        rank: int,
        row_bytes: int,
        partial_row_bytes: int,
        num_partials: int,
        num_tokens: int,
    ) -> StageTable:
        """This rank's table of the combine: the same plan transposed.

        row_bytes: of a row between servers. partial_row_bytes: of a rank's sum inside a server.
        num_partials: the most partial rows that any proxy gave out in the dispatch. num_tokens: of
        this rank.
        """
        self._check_rank(rank)
        return StageTable(
            self._core.combine_table_bytes(
                rank, row_bytes, partial_row_bytes, num_partials, num_tokens
            )
        )

    def validate_combine(
        self,
        row_bytes: int,
        partial_row_bytes: int,
        num_partials: int,
        num_tokens_per_rank: Sequence[int],
    ) -> None:
        """Lower every rank's combine and check the tables as `validate` does the dispatch's.

        num_tokens_per_rank: [R]. Others as in `combine_table`. Raises RuntimeError listing the
        faults found.
        """
        faults = self._core.validate_combine(
            row_bytes, partial_row_bytes, num_partials, [int(t) for t in num_tokens_per_rank]
        )
        if faults:
            raise RuntimeError("the combine is not valid:\n  " + "\n  ".join(faults))

    def staging_rows_of(self, rank: int) -> tuple[int, int]:
        """Rows that a rank puts, and that it gets, over scale-out."""
        self._check_rank(rank)
        return tuple(self._core.staging_rows_of(rank))

    def packed_rows_of(self, rank: int) -> int:
        """Rows that a rank hands to other ranks of its server for the way out."""
        self._check_rank(rank)
        return int(self._core.packed_rows_of(rank))


def plan_moe(
    to_server: npt.NDArray[np.int64],
    to_rank: npt.NDArray[np.int64],
    topology: Topology,
    row_bytes: int,
    policy: Policy = "auto",
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    chunk_slots: int = DEFAULT_CHUNK_SLOTS,
    credit_lead: int = DEFAULT_CREDIT_LEAD,
) -> MoePlan:
    """Plan a dispatch: tokens that cross once to each server, on any rail.

    to_server: int64 [R, N], the distinct tokens of each rank for each server. to_rank: int64
    [R, R], for each rank. row_bytes: of a row with its header. Others as in `plan`; "direct" and
    "spreadout" leave each row on its owner's rail. Raises ValueError where the counts cannot be.
    """
    core = _core.plan_moe(
        np.ascontiguousarray(to_server, dtype=np.int64),
        np.ascontiguousarray(to_rank, dtype=np.int64),
        topology._core,
        row_bytes,
        _policy_index(policy),
        chunk_bytes,
        chunk_slots,
        credit_lead,
    )
    return MoePlan(core, topology)


def _policy_index(policy: str) -> int:
    index = _POLICY_INDEX.get(policy)
    if index is None:
        raise ValueError(f"policy must be one of {', '.join(_POLICY_INDEX)}, not {policy!r}")
    return index


def plan(
    traffic: npt.ArrayLike,
    topology: Topology,
    row_bytes: int,
    policy: Policy = "auto",
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    chunk_slots: int = DEFAULT_CHUNK_SLOTS,
    credit_lead: int = DEFAULT_CREDIT_LEAD,
) -> Plan:
    """Plan one call.

    traffic: [R, R] integers, rows from each rank (first index) to each rank.
    row_bytes: bytes of a row, at least 1.
    policy: "whole" (each server pair once), "split" (Birkhoff stages, exactly the bound), "direct"
        (no balancing, all puts at once), "spreadout" (the published baseline), or "auto" (the
        cheapest of the first three: direct for small calls and where scale-out is no slower than
        scale-up, split only up to 8 servers).
    chunk_bytes, chunk_slots: a put is cut into chunks of about chunk_bytes; a pair of ranks has
        chunk_slots flags, and chunks grow to fit them.
    credit_lead: chunks before its last one at which a receiver lets its next sender start.

    Raises ValueError naming the place: wrong shape, negative, fractional or NaN entries, sums past
    2^63 - 1. A float matrix is accepted only where every entry is a whole number below 2^53;
    nothing is ever scaled or rounded.
    """
    index = _policy_index(policy)
    matrix = traffic
    if not (
        type(matrix) is np.ndarray and matrix.dtype == np.int64 and matrix.flags.carray
    ) or matrix.shape != (topology.num_ranks, topology.num_ranks):
        matrix = _integer_matrix(traffic, topology.num_ranks)
    try:
        core = _core.plan(
            matrix, topology._core, row_bytes, index, chunk_bytes, chunk_slots, credit_lead
        )
    except TypeError:
        raise ValueError(
            f"row_bytes, chunk_bytes, chunk_slots and credit_lead must be whole numbers that are "
            f"not negative: {row_bytes!r}, {chunk_bytes!r}, {chunk_slots!r}, {credit_lead!r}"
        ) from None
    return Plan(core, topology)


def _integer_matrix(traffic: npt.ArrayLike, num_ranks: int) -> npt.NDArray[np.int64]:
    array = np.asarray(traffic)
    if array.shape != (num_ranks, num_ranks):
        raise ValueError(
            f"traffic must have shape [{num_ranks}, {num_ranks}], servers * gpus_per_server ranks, "
            f"not {list(array.shape)}"
        )
    if array.dtype == object:
        _refuse_first(
            array,
            np.vectorize(lambda v: not isinstance(v, (int, np.integer)), otypes=[bool])(array),
            "is",
        )
        _refuse_first(array, (array < -(1 << 63)) | (array >= 1 << 63), "does not fit 63 bits:")
    elif array.dtype.kind == "f":
        _refuse_first(array, ~np.isfinite(array), "is not a number of rows:")
        _refuse_first(array, array != np.floor(array), "is fractional:")
        _refuse_first(array, np.abs(array) >= 2.0**53, "is past 2^53, where floats skip integers:")
    elif array.dtype.kind == "u":
        _refuse_first(array, array > np.iinfo(np.int64).max, "does not fit 63 bits:")
    elif array.dtype.kind != "i":
        raise ValueError(f"traffic must hold integers, not {array.dtype}")
    return np.require(array, np.int64, ["C_CONTIGUOUS", "ALIGNED", "WRITEABLE"])


def _refuse_first(array: npt.NDArray[Any], bad: npt.NDArray[np.bool_], text: str) -> None:
    if not np.any(bad):
        return
    src, dst = (int(k) for k in np.argwhere(bad)[0])
    raise ValueError(f"traffic[{src}][{dst}] {text} {array[src, dst]!r}")
