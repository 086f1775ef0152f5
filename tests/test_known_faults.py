"""Faults that other libraries shipped, in small: each with the right value written out.

Four ranks as processes, or the planner alone. Expected values are written out or come from the
definition, never from another library. Faults of flags and their order (F12 to F15) are in
test_known_faults_flags.py.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from fastkern import Communicator
from fastkern.planner import Topology, plan
from tests.processes import Pool

CANARY = -77
DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def all_equal(errors: list[BaseException], kind: type[BaseException]) -> str:
    """The errors' one text; they must be of this very type and say the same."""
    assert [type(e) for e in errors] == [kind] * len(errors), errors
    texts = {str(e) for e in errors}
    assert len(texts) == 1, texts
    return texts.pop()


def still_works(comm: Communicator, rank: int, num_ranks: int) -> None:
    """A call of one row per pair gives the right rows."""
    out = torch.full((num_ranks,), CANARY)
    comm.all_to_all_single(out, torch.arange(num_ranks) + 10 * rank)
    assert out.tolist() == [10 * src + rank for src in range(num_ranks)]


def raise_untouched(
    rank: int,
    num_ranks: int,
    sent: list[list[int]],
    expected: list[list[int]],
    dtypes: list[str],
    widths: list[int],
) -> None:
    """A call that must raise: outputs stay as they were, and the communicator usable."""
    dtype, width = DTYPES[dtypes[rank]], widths[rank]
    with Communicator(entry_timeout_s=10) as comm:
        source = torch.ones(sum(sent[rank]), width, dtype=dtype)
        out = torch.full((sum(expected[rank]), width), CANARY, dtype=dtype)
        try:
            comm.all_to_all_single(out, source, expected[rank], sent[rank])
        except (ValueError, TypeError):
            assert (out == CANARY).all()
            still_works(comm, rank, num_ranks)
            raise


# -- F01: default splits ---------------------------------------------------------------------------


def default_splits(rank: int, num_ranks: int) -> None:
    with Communicator(entry_timeout_s=10) as comm:
        out = torch.full((5, 3), CANARY, dtype=torch.float32)
        try:
            comm.all_to_all_single(out, torch.ones(5, 3))
        except ValueError:
            assert (out == CANARY).all()
            still_works(comm, rank, num_ranks)
            raise


def test_f01_five_rows_do_not_divide_over_four_ranks(four: Pool) -> None:
    text = all_equal(four.errors(default_splits), ValueError)
    assert "5 rows" in text
    assert "4 ranks" in text


# -- F02: splits disagree --------------------------------------------------------------------------

ONES = [[1, 1, 1, 1]] * 4


@pytest.mark.parametrize(
    ("sent", "expected", "numbers"),
    [
        (ONES, [[1, 2, 1, 1], *ONES[1:]], "src 1, dst 0: sent 1, expected 2"),
        ([ONES[0], [2, 1, 1, 1], *ONES[2:]], ONES, "src 1, dst 0: sent 2, expected 1"),
    ],
    ids=["receiver", "sender"],
)
def test_f02_disagreeing_splits_are_one_error_on_all_ranks(
    four: Pool, sent: list[list[int]], expected: list[list[int]], numbers: str
) -> None:
    begin = time.monotonic()
    errors = four.errors(raise_untouched, sent, expected, ["float32"] * 4, [3] * 4)
    assert time.monotonic() - begin < 8, "the deadline ended it, not the check"
    text = all_equal(errors, ValueError)
    assert numbers in text
    assert text.count("src") == 1, "pairs that agree are named too"


# -- F03: silent rank ------------------------------------------------------------------------------

RAMP = [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]
RAMP_T = [[0, 1, 2, 3]] * 4
DENSE = [[4, 3, 2, 1], [1, 4, 3, 2], [2, 1, 4, 3], [3, 2, 1, 4]]


def rows_of(call: int, traffic: list[list[int]], src: int) -> torch.Tensor:
    """int64 [rows, 2]: (call, 1000 * src + 100 * dst + row) in order of destination."""
    words = [
        [call, 1000 * src + 100 * dst + row]
        for dst in range(len(traffic))
        for row in range(traffic[src][dst])
    ]
    return torch.tensor(words, dtype=torch.int64).reshape(-1, 2)


def rows_for(call: int, traffic: list[list[int]], dst: int) -> list[list[int]]:
    """What the rank receives, in order of source."""
    return [
        [call, 1000 * src + 100 * dst + row]
        for src in range(len(traffic))
        for row in range(traffic[src][dst])
    ]


def silent_rank(rank: int, num_ranks: int, policy: str) -> int:
    """100 times four matrices; how many calls this rank entered."""
    options: dict[str, Any] = {"servers": 2, "policy": policy, "entry_timeout_s": 20}
    with Communicator(**options) as comm:
        call = 0
        for _ in range(100):
            for traffic in (RAMP, RAMP_T, [[0] * 4] * 4, DENSE):
                call += 1
                sent, received = traffic[rank], [row[rank] for row in traffic]
                out = torch.full((sum(received), 2), CANARY)
                comm.all_to_all_single(out, rows_of(call, traffic, rank), received, sent)
                assert out.tolist() == rows_for(call, traffic, rank), f"call {call}"
        return comm._runtime.call


@pytest.mark.parametrize("policy", ["direct", "whole"])
def test_f03_a_rank_with_nothing_to_send_takes_part(four: Pool, policy: str) -> None:
    assert four.run(silent_rank, policy) == [400] * 4


# -- F04: dtypes differ ----------------------------------------------------------------------------


def test_f04_int64_is_not_float64(four: Pool) -> None:
    dtypes = ["int64", "float64", "float64", "float64"]
    text = all_equal(four.errors(raise_untouched, ONES, ONES, dtypes, [3] * 4), TypeError)
    assert "rank 0: int64" in text
    assert "ranks 1, 2, 3: float64" in text


def test_f04_float16_is_not_float32_of_half_the_width(four: Pool) -> None:
    dtypes, widths = ["float16", "float32", "float16", "float32"], [8, 4, 8, 4]
    text = all_equal(four.errors(raise_untouched, ONES, ONES, dtypes, widths), TypeError)
    assert "ranks 0, 2: float16" in text
    assert "ranks 1, 3: float32" in text


# -- F08: odd widths -------------------------------------------------------------------------------

WIDTHS = (1, 7, 8, 24, 129, 1368, 1536, 2880, 3584, 7168)
UNEVEN = [[1, 2, 0, 3], [2, 0, 1, 1], [0, 3, 2, 1], [1, 1, 1, 0]]


def random_rows(src: int, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, width] of random bytes; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * width + src)
    num_bytes = width * dtype.itemsize
    return torch.randint(256, (num_rows, num_bytes), generator=generator, dtype=torch.uint8).view(
        dtype
    )


def odd_widths(rank: int, num_ranks: int, name: str, canary: int) -> None:
    """Rows of every width into an output with bytes of no concern behind each row."""
    dtype = DTYPES[name]
    received = [row[rank] for row in UNEVEN]
    with Communicator(servers=2, policy="whole", entry_timeout_s=20) as comm:
        for width in WIDTHS:
            sources = [random_rows(s, sum(UNEVEN[s]), width, dtype) for s in range(num_ranks)]
            parts = [torch.split(sources[s], UNEVEN[s])[rank] for s in range(num_ranks)]
            expected = torch.cat([p.view(torch.uint8) for p in parts])
            row_bytes = width * dtype.itemsize
            if canary % dtype.itemsize == 0 and canary:  # a strided output
                whole = torch.full((sum(received), row_bytes + canary), 0xC5, dtype=torch.uint8)
                out = whole.view(dtype)[:, :width]
                rows, tail = whole[:, :row_bytes], whole[:, row_bytes:]
            else:  # a contiguous one, between guards
                flat = torch.full((sum(received) * row_bytes + 128,), 0xC5, dtype=torch.uint8)
                middle = flat[64:-64]
                out = middle.view(dtype).view(-1, width)
                rows, tail = middle.view(-1, row_bytes), torch.cat([flat[:64], flat[-64:]])
            comm.all_to_all_single(out, sources[rank], received, UNEVEN[rank])
            assert torch.equal(rows, expected), f"{name}, width {width}"
            assert (tail == 0xC5).all(), f"{name}, width {width}: bytes behind rows overwritten"


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("canary", [0, 16], ids=["contiguous", "strided"])
def test_f08_odd_widths_leave_the_bytes_behind_rows(four: Pool, name: str, canary: int) -> None:
    four.run(odd_widths, name, canary)


# -- F16: decomposition ----------------------------------------------------------------------------

ODD = np.array([[6, 7, 7, 0], [1, 7, 12, 0], [9, 6, 1, 4], [4, 0, 0, 16]])
POLICIES = ("auto", "whole", "split", "direct", "spreadout")


@pytest.mark.parametrize("policy", POLICIES)
def test_f16_fractional_traffic_is_refused_by_name(policy: str) -> None:
    with pytest.raises(ValueError, match=r"traffic\[0\]\[0\] is fractional: .*4\.19"):
        plan(ODD * 0.7, Topology(4, 1), 8, policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.uint64])
@pytest.mark.parametrize("factor", [1, 1_000_000_000])
def test_f16_large_integers_are_exact(kind: type[np.generic], factor: int) -> None:
    """Off the diagonal, column 2 is the busiest: 7 + 12 + 0 = 19."""
    traffic = (ODD * factor).astype(kind)
    made = plan(traffic, Topology(4, 1), 8, "split")
    made.validate()
    assert made.bound_rows == 19 * factor
    assert made.completion_rows == 19 * factor
    sent = np.zeros((4, 4), dtype=np.int64)
    for rank in range(4):
        for peer, rows in made.puts(rank):
            sent[rank, peer] += rows
    assert (sent == ODD * factor * (1 - np.eye(4, dtype=np.int64))).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("per_server", [1, 2, 4])
def test_f16_every_policy_plans_it_times_a_billion(policy: str, per_server: int) -> None:
    traffic = ODD * 1_000_000_000
    made = plan(traffic, Topology(4 // per_server, per_server), 8, policy)  # type: ignore[arg-type]
    made.validate()
    for rank in range(4):
        header = made.table(rank).header
        assert int(header["input_rows"]) == int(traffic[rank].sum())
        assert int(header["output_rows"]) == int(traffic[:, rank].sum())
