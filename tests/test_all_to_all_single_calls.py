"""PyTorch's contract of all_to_all_single: groups, calls in the background, wrong arguments."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastkern
from fastkern import Communicator, Work
from tests.processes import Pool

CANARY = -77


def check(rank: int, num_ranks: int, value: int, group: Any = None, **options: Any) -> None:
    """One call of rank + 1 rows per destination; rows carry (value, src, dst)."""
    source, out, expected = a_call(rank, num_ranks, value)
    received = [src + 1 for src in range(num_ranks)]
    fastkern.all_to_all_single(
        out, source, received, [rank + 1] * num_ranks, group=group, **options
    )
    assert out.tolist() == expected


def a_call(
    rank: int, num_ranks: int, value: int
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Input, empty output, and what it must become, for splits src + 1."""
    source = torch.tensor([[value, rank, d] for d in range(num_ranks) for _ in range(rank + 1)])
    expected = [[value, src, rank] for src in range(num_ranks) for _ in range(src + 1)]
    return source, torch.full((len(expected), 3), CANARY), expected


def queue(comm: Communicator, source: torch.Tensor, out: torch.Tensor) -> Work:
    """The call of `a_call` in the background."""
    received = [src + 1 for src in range(comm.num_ranks)]
    sent = [comm.rank + 1] * comm.num_ranks
    work = comm.all_to_all_single(out, source, received, sent, async_op=True)
    assert isinstance(work, Work)
    return work


# -- groups ----------------------------------------------------------------------------------------


def two_groups(rank: int, num_ranks: int, members: list[list[int]]) -> None:
    """Both groups at work at once, at their own pace, then everyone together."""
    groups = [dist.new_group(ranks) for ranks in members]
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            for call in range(20):
                time.sleep(0.001 * ((call * 7 + rank * 5) % 4))
                check(ranks.index(rank), len(ranks), 100 * ranks[0] + call, group)
            assert fastkern.communicator_of(group).num_ranks == len(ranks)
    check(rank, num_ranks, 7)


@pytest.mark.parametrize(
    "members", [[[1, 3], [0, 2]], [[3], [0, 1, 2]], [[2, 3], [0, 1]], [[0], [3]]], ids=str
)
def test_two_groups_at_once_of_ranks_that_are_not_neighbours(
    four: Pool, members: list[list[int]]
) -> None:
    four.run(two_groups, members)


def overlapping_groups(rank: int, num_ranks: int) -> None:
    """Ranks 0 and 3 are in both groups and queue their calls in opposite orders."""
    members = [[0, 1, 3], [0, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [(g, ranks) for g, ranks in zip(groups, members, strict=True) if rank in ranks]
    comms = [fastkern.init(group) for group, _ in mine]
    for call in range(20):
        order = range(len(mine)) if rank != 3 else reversed(range(len(mine)))
        queued = []
        for k in order:
            ranks = mine[k][1]
            source, out, expected = a_call(ranks.index(rank), 3, 10 * call + sum(ranks))
            queued.append((queue(comms[k], source, out), out, expected))
        for work, out, expected in queued:
            work.wait(timedelta(seconds=20))
            assert out.tolist() == expected


def test_overlapping_groups_whose_calls_are_queued_in_opposite_orders(four: Pool) -> None:
    four.run(overlapping_groups)


def outsider(rank: int, num_ranks: int) -> list[str]:
    """The warnings of a call on the group of ranks 1 and 3."""
    group = dist.new_group([1, 3])
    source, out, _ = a_call(rank // 2, 2, 0)
    received, sent = [1, 2], [rank // 2 + 1] * 2
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        work = fastkern.all_to_all_single(out, source, received, sent, group, async_op=True)
    if rank in (1, 3):
        assert work is not None
        work.wait()
    else:
        assert work is None
        assert (out == CANARY).all()
    return [str(w.message) for w in seen]


def test_a_rank_outside_the_group_gets_a_warning_and_none(four: Pool) -> None:
    seen = four.run(outsider)
    assert seen[1] == seen[3] == []
    for rank in (0, 2):
        assert len(seen[rank]) == 1
        assert "not part of" in seen[rank][0]


def init_again(rank: int, num_ranks: int) -> None:
    first = fastkern.init(servers=2, policy="whole")
    check(rank, num_ranks, 1)
    second = fastkern.init(servers=4, policy="direct")
    assert fastkern.communicator_of(dist.group.WORLD) is second
    with pytest.raises(fastkern.ClosedError):
        first.barrier()
    check(rank, num_ranks, 2)
    assert second.stats.plan is not None
    assert second.stats.plan.policy == "direct"
    fastkern.shutdown()
    check(rank, num_ranks, 3)  # makes a communicator of its own
    assert fastkern.communicator_of() is not second


def test_init_replaces_the_communicator_made_before(four: Pool) -> None:
    four.run(init_again)


# -- calls in the background -----------------------------------------------------------------------


def in_the_background(rank: int, num_ranks: int) -> None:
    with Communicator(servers=2) as comm:
        source, out, expected = a_call(rank, num_ranks, 5)
        if rank == 3:
            time.sleep(0.4)
        work = queue(comm, source, out)
        if rank != 3:
            assert not work.is_completed(), "rank 3 has not even called"
            assert not work.is_success()
            assert work.exception() is None
            with pytest.raises(TimeoutError):
                work.wait(timeout=timedelta(milliseconds=20))
            assert (out == CANARY).all()
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert out.tolist() == expected
        assert work.wait() is True


def test_async_op_returns_before_the_others_have_called(four: Pool) -> None:
    four.run(in_the_background)


def several_queued(rank: int, num_ranks: int) -> None:
    with Communicator(servers=2, policy="whole") as comm:
        queued = []
        for value in range(8):
            source, out, expected = a_call(rank, num_ranks, value)
            if value % 2 == 0:
                time.sleep(0.002 * rank)
            queued.append((queue(comm, source.clone(), out), out, expected))
            del source
        for work, out, expected in reversed(queued):
            work.wait()
            assert out.tolist() == expected
        # A call in the foreground comes after those that are queued.
        source, out, expected = a_call(rank, num_ranks, 100)
        work = queue(comm, source, out)
        source, later, expected_later = a_call(rank, num_ranks, 101)
        received = [src + 1 for src in range(num_ranks)]
        assert comm.all_to_all_single(later, source, received, [rank + 1] * num_ranks) is None
        assert work.is_completed()
        assert out.tolist() == expected
        assert later.tolist() == expected_later
        # Each call reads its input when its turn comes, the output of the one before.
        ring = torch.tensor([rank] * num_ranks)
        for _ in range(4):
            comm.all_to_all_single(ring, ring, async_op=True)
        comm.barrier()
        assert ring.tolist() == [rank] * num_ranks
        work = queue(comm, *a_call(rank, num_ranks, 7)[:2])
    assert work.is_success(), "close waits for queued calls"


def test_queued_calls_run_in_order(four: Pool) -> None:
    four.run(several_queued)


def error_in_the_background(rank: int, num_ranks: int) -> None:
    with Communicator(servers=2, entry_timeout_s=10) as comm:
        out = torch.full((4 + (rank == 2),), CANARY)
        received = [1, 1, 2, 1] if rank == 2 else [1] * 4
        bad = comm.all_to_all_single(out, torch.ones(4, dtype=torch.int64), received, async_op=True)
        source, later, expected = a_call(rank, num_ranks, 6)
        good = queue(comm, source, later)
        assert bad is not None
        good.wait()
        assert later.tolist() == expected
        assert bad.is_completed()
        assert not bad.is_success()
        assert (out == CANARY).all()
        error = bad.exception()
        assert error is not None
        with pytest.raises(ValueError, match="src 2, dst 2: sent 1, expected 2"):
            bad.wait()
        raise error


def test_an_error_in_the_background_comes_with_wait(four: Pool) -> None:
    errors = four.errors(error_in_the_background)
    assert {type(e) for e in errors} == {ValueError}
    assert len({str(e) for e in errors}) == 1


# -- wrong arguments -------------------------------------------------------------------------------

Arguments = tuple[Any, Any, Any, Any]


def fine() -> Arguments:
    """(output, input, output splits, input splits), 12-byte rows."""
    return torch.full((4, 3), float(CANARY)), torch.ones(4, 3), [1] * 4, [1] * 4


class Overlapping:
    """Outputs that hold an element at several places."""

    expanded = staticmethod(lambda: torch.zeros(1, 3).expand(4, 3))
    sliding = staticmethod(lambda: torch.zeros(6).as_strided((4, 3), (1, 1)))


WRONG: dict[str, tuple[Callable[[], Arguments], type[Exception], str]] = {
    "negative_split": (
        lambda: (*fine()[:2], [1, -1, 2, 2], None),
        ValueError,
        "output_split_sizes[1] is -1",
    ),
    "too_few_splits": (
        lambda: (*fine()[:3], [2, 1, 1]),
        ValueError,
        "input_split_sizes has 3 entries for 4 ranks",
    ),
    "sum": (
        lambda: (*fine()[:3], [1, 1, 1, 2]),
        ValueError,
        "input_split_sizes sum to 5, but input has 4 rows",
    ),
    "float_splits": (lambda: (*fine()[:3], [1.0] * 4), TypeError, "must be integers"),
    "one_number": (lambda: (*fine()[:2], 4, None), TypeError, "output_split_sizes"),
    "none_among_splits": (lambda: (*fine()[:3], [1, 1, 1, None]), TypeError, "must be integers"),
    "no_tensor": (
        lambda: (fine()[0], [1.0] * 4, None, None),
        TypeError,
        "input must be a tensor, not list",
    ),
    "numpy": (
        lambda: (np.zeros((4, 3), dtype=np.float32), *fine()[1:]),
        TypeError,
        "output must be a tensor, not ndarray",
    ),
    "no_output": (lambda: (None, *fine()[1:]), TypeError, "output must be a tensor, not NoneType"),
    "dtypes": (
        lambda: (torch.zeros(4, 3, dtype=torch.float64), *fine()[1:]),
        TypeError,
        "output is float64 but input is float32",
    ),
    "widths": (
        lambda: (torch.zeros(4, 5), *fine()[1:]),
        ValueError,
        "a row of input [4, 3] has 12 bytes, a row of output [4, 5] has 20",
    ),
    "other_widths": (
        lambda: (torch.zeros(4, 5), torch.zeros(4, 5), None, None),
        ValueError,
        "row widths differ between ranks: ranks 0, 1, 3: 12 bytes; rank 2: 20 bytes",
    ),
    "no_dimension": (
        lambda: (torch.tensor(1.0), *fine()[1:]),
        ValueError,
        "output has no dimension to split",
    ),
    "expanded": (lambda: (Overlapping.expanded(), *fine()[1:]), ValueError, "several places"),
    "sliding": (lambda: (Overlapping.sliding(), *fine()[1:]), ValueError, "several places"),
    "meta": (lambda: (fine()[0], torch.ones(4, 3, device="meta"), None, None), TypeError, "meta"),
    "sparse": (lambda: (fine()[0], torch.ones(4, 3).to_sparse(), None, None), TypeError, "sparse"),
    "quantized": (
        lambda: (
            fine()[0],
            torch.quantize_per_tensor(torch.ones(4, 3), 1.0, 0, torch.qint8),
            None,
            None,
        ),
        TypeError,
        "input",
    ),
    # What else may go wrong with a rank's own tensors must reach the others too.
    "nested": (
        lambda: (
            fine()[0],
            torch.nested.nested_tensor([torch.ones(3) for _ in range(4)]),
            None,
            None,
        ),
        Exception,
        "",
    ),
    "too_large_to_make_contiguous": (
        lambda: (fine()[0], torch.ones(1, 3).expand(1 << 58, 3), None, [1 << 56] * 4),
        Exception,
        "",
    ),
}


def wrong_on_one_rank(rank: int, num_ranks: int, name: str, wrong_rank: int) -> None:
    """Raises what the call raises, having checked that nothing moved and that calls go on."""
    with Communicator(servers=2, entry_timeout_s=4) as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and deprecated tensors
        out, source, received, sent = WRONG[name][0]() if rank == wrong_rank else fine()
        try:
            comm.all_to_all_single(out, source, received, sent)
        except fastkern.FastkernError:
            raise  # ranks waited for the wrong one
        except Exception:
            if rank != wrong_rank:
                assert (out == CANARY).all(), "rows moved"
            after = torch.full((4,), CANARY)
            comm.all_to_all_single(after, torch.full((4,), rank))
            assert after.tolist() == [0, 1, 2, 3]
            raise


@pytest.mark.parametrize("name", WRONG)
def test_one_rank_is_wrong_and_all_raise_the_same(four: Pool, name: str) -> None:
    _, kind, text = WRONG[name]
    errors = four.errors(wrong_on_one_rank, name, 2)
    assert len({(type(e), str(e)) for e in errors}) == 1, errors
    assert isinstance(errors[0], kind)
    assert not isinstance(errors[0], fastkern.FastkernError), "a deadline, not the cause"
    assert text in str(errors[0])
    assert "rank 2: " in str(errors[0])


def two_are_wrong(rank: int, num_ranks: int) -> None:
    with Communicator(entry_timeout_s=4) as comm:
        splits = {1: [4, 4, 4, 4], 3: "many"}.get(rank)
        comm.all_to_all_single(*fine()[:2], splits)  # type: ignore[arg-type]


def test_two_ranks_are_wrong_and_both_are_named(four: Pool) -> None:
    errors = four.errors(two_are_wrong)
    assert len({(type(e), str(e)) for e in errors}) == 1, errors
    assert "rank 1: output_split_sizes sum to 16" in str(errors[0])
    assert "rank 3: output_split_sizes must be integers, not 'many'" in str(errors[0])
