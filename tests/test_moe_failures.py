"""Dispatch and combine when ranks are late, stop midway, or die: errors on the others, no hang."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastkern import Communicator, DeadlineError, FastkernError, PeerLostError
from fastkern.moe.handle import Handle
from tests.processes import Pool, ProcessEnded
from tests.test_runtime_failures import Failure, failure_of

NUM_EXPERTS = 8


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    idx = torch.stack([torch.randperm(NUM_EXPERTS, generator=g)[:4] for _ in range(6)])
    return torch.randn(6, 5, generator=g), idx, torch.rand(6, 4, generator=g)


def there_and_back(comm: Communicator) -> tuple[torch.Tensor, Handle]:
    """A dispatch and its combine, checked; recv_x and the handle."""
    x, idx, weights = inputs(comm.rank)
    recv, recv_weights, _, handle = comm.dispatch(x, idx, weights, num_experts=NUM_EXPERTS)
    assert isinstance(recv, torch.Tensor)
    y = comm.combine(recv, handle, weights=recv_weights)
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True))
    return recv, handle


def warm_up() -> None:
    """What the first call in a process loads takes its time."""
    with Communicator() as comm:
        there_and_back(comm)


def one_more(comm: Communicator, op: str, recv: torch.Tensor, handle: Handle) -> Any:
    if op == "combine":
        return comm.combine(recv, handle)
    x, idx, _ = inputs(comm.rank)
    if op == "dispatch again":
        return comm.dispatch(x, handle=handle)
    if op == "dispatch_start":
        return comm.dispatch_start(x, idx, num_experts=NUM_EXPERTS).finish()
    return comm.dispatch(x, idx, num_experts=NUM_EXPERTS)


OPS = ("dispatch", "combine", "dispatch again", "dispatch_start")


def late(rank: int, num_ranks: int, op: str) -> Failure | None:
    """Rank 3 comes when the others have given up; then all make a fresh communicator."""
    warm_up()
    with Communicator(servers=2, entry_timeout_s=0.8, progress_timeout_s=0.8) as comm:
        recv, handle = there_and_back(comm)
        dist.barrier()
        time.sleep(2 if rank == 3 else 0.05 * rank)
        failure = failure_of(lambda: one_more(comm, op, recv, handle))
        again = failure_of(lambda: one_more(comm, op, recv, handle))
        assert again is not None
        assert issubclass(again.kind, FastkernError)
        dist.barrier()
    with Communicator(servers=2) as fresh:
        there_and_back(fresh)
    return failure


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_does_not_call_is_named(four: Pool, op: str) -> None:
    failures = four.run(late, op)
    for rank, failure in enumerate(failures):
        assert failure is not None, f"rank {rank} returned from a call that others gave up"
        assert failure.kind is DeadlineError, failure
    for failure in failures[:3]:
        assert failure.missing == (3,), failure
        assert re.search(
            rf"{op.split()[0].split('_')[0]}, call \d: not entered by rank 3\b", failure.text
        )


def stops_midway(rank: int, num_ranks: int, op: str) -> Failure | None:
    """Rank 2 enters the call, then does not launch."""
    warm_up()
    with Communicator(servers=2, progress_timeout_s=0.6) as comm:
        recv, handle = there_and_back(comm)
        if rank == 2:

            def sleep(*_: object) -> None:
                time.sleep(2.5)
                raise RuntimeError("no kernel today")

            comm._runtime.launch_moe = sleep  # type: ignore[method-assign]
        failure = failure_of(lambda: one_more(comm, op, recv, handle))
        dist.barrier()
    with Communicator(servers=2) as fresh:
        there_and_back(fresh)
    return failure


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_stops_midway(four: Pool, op: str) -> None:
    """The deadline's record names the operation and what was awaited."""
    failures = four.run(stops_midway, op)
    assert failures[2] is not None
    assert failures[2].kind is RuntimeError
    for rank in (0, 1, 3):
        failure = failures[rank]
        assert failure is not None, f"rank {rank} returned from a call that rank 2 left"
        assert failure.kind is DeadlineError, failure
        assert failure.record is not None, failure
        assert failure.record.op == op.split()[0].split("_")[0]
        assert failure.record.peer != failure.record.rank
        assert failure.record.waited_s >= 0.5


def dies(rank: int, num_ranks: int, op: str) -> Failure | None:
    import os

    comm = Communicator(servers=2, progress_timeout_s=5)
    recv, handle = there_and_back(comm)
    dist.barrier()
    if rank == 1:
        os._exit(7)
    return failure_of(lambda: one_more(comm, op, recv, handle))


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_rank_that_dies_is_named(mortal_four: Pool, op: str) -> None:
    outcomes = mortal_four.outcomes(dies, op)
    assert isinstance(outcomes[1].error, ProcessEnded)
    for rank in (0, 2, 3):
        failure = outcomes[rank].value
        assert failure is not None, outcomes[rank]
        assert failure.kind in (PeerLostError, DeadlineError), failure
        assert re.search(r"rank 1\b", failure.text), failure


def too_large(rank: int, num_ranks: int) -> list[str]:
    with Communicator(servers=2, max_buffer_bytes=1 << 20) as comm:
        recv, handle = there_and_back(comm)
        texts = []
        wide = torch.zeros(6, 100_000)
        for call in (
            lambda: comm.dispatch(wide, handle=handle),
            lambda: comm.combine(torch.zeros(len(recv), 100_000), handle),
        ):
            failure = failure_of(call)
            assert failure is not None
            texts.append(f"{failure.kind.__name__}: {failure.text}")
        there_and_back(comm)  # nothing is broken
    return texts


def test_what_does_not_fit_is_refused_on_every_rank(four: Pool) -> None:
    seen = {tuple(texts) for texts in four.run(too_large)}
    assert len(seen) == 1
    for op, text in zip(("dispatch", "combine"), seen.pop(), strict=True):
        assert re.match(
            rf"ValueError: {op}: needs \d+ bytes of staging per rank, max_buffer_bytes is 1048576",
            text,
        )
