"""Route against its definition: counts, row headers, pack list and token map, for any number of
units. What a rank finds follows from topk_idx alone, whoever counts which run of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern.kernels import _host
from fastkern.moe.handle import ENTRY_BYTES, HEADER, LAYOUTS, MAGIC, NONE
from tests.route_reference import (
    UNWRITTEN,
    Bases,
    Case,
    Filled,
    Words,
    expected,
    random_bases,
)

UNITS = (1, 2, 3, 7, 64)
NO_BAD = 2**64 - 1


class Route:
    """The host's route, with the memory that it looks at."""

    def __init__(self, case: Case, num_units: int, dtype: str = "int64") -> None:
        self.case = case
        self.idx = np.ascontiguousarray(case.idx, dtype=dtype)
        self.found = _host.HostRoute(
            topk_idx=self.idx.ctypes.data,
            idx_bytes=self.idx.itemsize,
            num_tokens=len(self.idx),
            topk=self.idx.shape[1],
            owner=case.owner,
            local_index=case.local_index,
            servers=case.servers,
            gpus_per_server=case.gpus_per_server,
            rank=case.rank,
            num_units=num_units,
        )

    def fill(self, bases: Bases, num_rows: int, layout: str) -> Filled:
        """The arrays; everything after them must stay as it was."""
        case = self.case
        header: Any = np.zeros(1, dtype=HEADER)
        header["magic"] = MAGIC
        header["num_tokens"], header["pack_rows"] = len(case.idx), num_rows
        header["num_ranks"], header["servers"] = case.num_ranks, case.servers
        header["gpus_per_server"], header["topk"] = case.gpus_per_server, case.idx.shape[1]
        header["num_experts"], header["layout"] = len(case.owner), LAYOUTS.index(layout)
        offsets = _host.handle_layout(header.view(np.uint8))
        memory = np.full(int(offsets["bytes"]) // 8 + 8, UNWRITTEN << 32 | UNWRITTEN, np.uint64)
        raw = memory.view(np.uint8)
        raw[: HEADER.itemsize] = header.view(np.uint8)
        self.found.fill(
            memory.ctypes.data,
            *(np.array(base, dtype=np.uint64) for base in bases),
            LAYOUTS.index(layout),
        )
        assert (raw[: HEADER.itemsize] == header.view(np.uint8)).all()
        assert (raw[int(offsets["window_slots"]) :].view(np.uint32) == UNWRITTEN).all()

        def array(name: str, *shape: int) -> Words:
            begin = int(offsets[name])
            return raw[begin : begin + 4 * int(np.prod(shape))].view(np.uint32).reshape(shape)

        assert ENTRY_BYTES == 12
        return Filled(
            array("pack_list", num_rows),
            array("entries", num_rows, case.idx.shape[1], 3),
            array("token_map", len(case.idx), case.servers + case.gpus_per_server),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    servers, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = st.integers(0, servers * m - 1)
    owner = draw(st.lists(ranks, min_size=1, max_size=9))
    topk, tokens = draw(st.sampled_from([1, 2, 5, 32])), draw(st.sampled_from([0, 1, 2, 9, 30]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Case(servers, m, draw(ranks), owner, generator.integers(-1, len(owner), (tokens, topk)))


def check(case: Case, num_units: int, dtype: str, layout: str, seed: int = 0) -> None:
    route = Route(case, num_units, dtype)
    assert route.found.bad == NO_BAD
    assert route.found.totals.tolist() == case.totals()
    bases, num_rows = random_bases(case, seed)
    filled = route.fill(bases, num_rows, layout)
    for name, got, right in zip(
        Filled._fields, filled, expected(case, bases, num_rows, layout), strict=True
    ):
        np.testing.assert_array_equal(got, right, err_msg=name)


@settings(max_examples=150, deadline=None)
@given(
    case=cases(),
    num_units=st.sampled_from(UNITS),
    dtype=st.sampled_from(["int32", "int64"]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
)
def test_route(case: Case, num_units: int, dtype: str, layout: str, seed: int) -> None:
    check(case, num_units, dtype, layout, seed)


# The example at the top of kernels/body/route.h: 2 servers x 2 ranks, an expert each.
EXAMPLE = Case(2, 2, 0, [0, 1, 2, 3], np.array([[0, 2], [3, 2], [-1, 1]]))


@pytest.mark.parametrize("num_units", UNITS)
def test_the_example(num_units: int) -> None:
    route = Route(EXAMPLE, num_units, "int32")
    assert route.found.totals.tolist() == [1, 1, 2, 1, 2, 2, 1, 1, 2, 1]
    bases = Bases([10, 20, 30, 40], [100, 200, 300, 400], [0, 1, 2, 4], [0, 0], [0, 0])
    filled = route.fill(bases, 4, "expert")
    assert filled.pack_list.tolist() == [0, 2, 0, 1]
    none = [NONE] * 3
    assert filled.entries.tolist() == [
        [[10, 100, 0], none],  # token 0 for rank 0
        [none, [20, 200, 1]],  # token 2 for rank 1
        [none, [30, 300, 0]],  # token 0 for server 1
        [[40, 400, 1], [31, 301, 0]],  # token 1 for server 1
    ]
    assert filled.token_map.tolist() == [
        [NONE, 0, 100, NONE],
        [NONE, 1, NONE, NONE],
        [NONE, NONE, NONE, 0],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_units", UNITS)
def test_duplicates(num_units: int, layout: str) -> None:
    """Each occurrence of an expert is a slot of its own, and the token still goes once."""
    idx = np.array([[1, 1, 1, 0], [1, -1, 1, 1]])
    case = Case(2, 1, 0, [0, 1], idx)
    assert case.totals() == [1, 6, 1, 2, 1, 2]
    check(case, num_units, "int64", layout)


@pytest.mark.parametrize("num_units", UNITS)
@pytest.mark.parametrize("idx", [np.zeros((0, 3), np.int64), np.full((4, 3), -1)])
def test_nothing_to_send(idx: npt.NDArray[np.int64], num_units: int) -> None:
    case = Case(2, 2, 1, [0, 3], idx)
    assert case.totals() == [0] * 8
    check(case, num_units, "int32", "expert")


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1, -(2**31), 2**32, 2**40 + 1, -(2**63)])
@pytest.mark.parametrize("num_units", UNITS)
def test_the_first_bad_index_is_named(num_units: int, bad: int) -> None:
    """Position in topk_idx, wherever the units begin; later ones do not matter."""
    dtype = "int32" if -(2**31) <= bad < 2**31 else "int64"
    for position in (0, 7, 16, 29):
        idx = np.arange(30) % 5 - 1
        idx[position:] = bad  # in other units too
        found = Route(EXAMPLE._replace(idx=idx.reshape(10, 3)), num_units, dtype).found
        assert found.bad == position
        assert found.totals[:4].tolist() == [int((idx[:position] == e).sum()) for e in range(4)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_units": 0}, "num_units"),
        ({"topk": 33}, "top-k"),
        ({"idx_bytes": 2}, "4 or 8 bytes"),
        ({"owner": [0, 4]}, "not a rank"),
        ({"local_index": [0]}, "entry per expert"),
        ({"num_tokens": 2**31}, "more than"),
    ],
)
def test_sizes_out_of_range(change: dict[str, Any], what: str) -> None:
    arguments: dict[str, Any] = {
        "topk_idx": 0,
        "idx_bytes": 8,
        "num_tokens": 0,
        "topk": 2,
        "owner": [0, 1],
        "local_index": [0, 0],
        "servers": 2,
        "gpus_per_server": 1,
        "rank": 0,
        "num_units": 1,
    }
    with pytest.raises(ValueError, match=what):
        _host.HostRoute(**{**arguments, **change})


def test_places_are_given_once() -> None:
    route = Route(EXAMPLE, 2)
    bases, num_rows = random_bases(EXAMPLE, 0)
    route.fill(bases, num_rows, "expert")
    with pytest.raises(ValueError, match="given out"):
        route.fill(bases, num_rows, "expert")
