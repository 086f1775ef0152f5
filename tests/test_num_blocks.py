"""num_blocks of a call on the host: what kernels are launched with; results do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkern import Communicator
from tests.processes import Pool
from tests.test_moe_bad_input import alike
from tests.test_moe_calls import routing

MOST = 5


class LoggingHost:
    """A runtime's HostRank that notes the blocks of each launch."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.blocks: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def launch(self, *arguments: Any) -> bool:
        self.blocks.append(arguments[-1].num_blocks)
        return bool(self._host.launch(*arguments))

    def launch_moe(self, *arguments: Any) -> bool:
        self.blocks.append(arguments[-1].num_blocks)
        return bool(self._host.launch_moe(*arguments))


@contextmanager
def logged(**options: Any) -> Iterator[tuple[Communicator, list[int]]]:
    """A communicator, and the blocks of its launches."""
    with Communicator(servers=2, chunk_bytes=64, entry_timeout_s=50, **options) as comm:
        runtime: Any = comm._runtime
        runtime._host = host = LoggingHost(runtime._host)
        yield comm, host.blocks


def step(comm: Communicator, layout: str, blocks: list[int | None]) -> list[Tensor]:
    """Every operation once and backward through all, with so many blocks each; what came of it."""
    x, idx, weights = routing(comm.rank, 17, 3, 6)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = torch.empty(12 * comm.num_ranks, 3)
    comm.all_to_all_single(out, out.new_ones(out.shape).cumsum(0), num_blocks=blocks[0])
    recv, recv_weights, _, handle = comm.dispatch(
        x, idx, weights, num_experts=6, layout=layout, num_blocks=blocks[1]
    )
    again = comm.dispatch(x * 2, handle=handle, num_blocks=blocks[2])[0]
    if layout == "rank":
        recv_weights = recv_weights.sum(1)
    y = comm.combine((recv + again).sin(), handle, recv_weights, num_blocks=blocks[3])
    y.square().sum().backward()
    pending = comm.dispatch_start(x.detach(), handle=handle, num_blocks=blocks[4])
    late = pending.finish()[0]
    assert x.grad is not None
    assert weights.grad is not None
    return [out, recv.detach(), again.detach(), y.detach(), x.grad, weights.grad, late]


def per_call(rank: int, num_ranks: int, layout: str) -> None:
    """Blocks differ by call and by rank."""
    with logged(num_blocks=MOST) as (comm, seen):
        expected = step(comm, layout, [None] * 5)
        # all-to-all, dispatch, again, combine; backward: of combine, of again, of dispatch's rows
        # and weights; the last dispatch
        assert seen == [MOST] * 9
        for turn in range(3):
            seen.clear()
            blocks = [1 + (turn + rank + k) % MOST for k in range(5)]
            got = step(comm, layout, list(blocks))
            a, b, c, d, e = blocks
            assert seen[:5] == [a, b, c, d, d]
            assert sorted(seen[5:8]) == sorted([c, b, b])
            assert seen[8:] == [e]
            for mine, theirs in zip(got, expected, strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_call_has_the_blocks_it_asks_for(four: Pool, layout: str) -> None:
    four.run(per_call, layout)


def compiled(rank: int, num_ranks: int) -> None:
    with logged(num_blocks=MOST) as (comm, seen):
        x, idx, weights = routing(rank, 9, 3, 6)

        def layer(x: Tensor) -> Tensor:
            recv, recv_weights, _, handle = comm.dispatch(
                x, idx, weights, num_experts=6, num_blocks=2
            )
            return comm.combine(recv.sin(), handle, recv_weights, num_blocks=3)

        expected = layer(x)
        seen.clear()
        whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x.requires_grad_()
        y = whole(x)
        assert torch.equal(y.detach(), expected)
        y.sum().backward()
        assert seen == [2, 3, 3, 2]


def test_in_a_compiled_graph(four: Pool) -> None:
    four.run(compiled, timeout_s=120)


def in_rounds(rank: int, num_ranks: int) -> None:
    with logged(num_blocks=MOST, max_buffer_bytes=3000) as (comm, seen):
        out = torch.empty(num_ranks * 60, 4)
        comm.all_to_all_single(out, torch.ones(out.shape), num_blocks=2)
        assert len(seen) > 1
        assert set(seen) == {2}
        seen.clear()
        work = comm.all_to_all_single(out, torch.ones(out.shape), async_op=True, num_blocks=3)
        assert work is not None
        work.wait()
        assert set(seen) == {3}


def test_calls_in_rounds_and_queued(four: Pool) -> None:
    four.run(in_rounds)


def bad_number(rank: int, num_ranks: int, value: Any) -> None:
    """Rank 1 asks for what there is not; afterwards the communicator works."""
    with logged(num_blocks=MOST - rank) as (comm, seen):
        out, ones = torch.full((num_ranks, 2), 7.0), torch.ones(num_ranks, 2)
        try:
            comm.all_to_all_single(out, ones, num_blocks=value if rank == 1 else 2)
        except (ValueError, TypeError):
            assert seen == []
            assert out.eq(7).all()
            comm.all_to_all_single(out, ones, num_blocks=MOST - rank)
            assert seen == [MOST - rank]
            assert torch.equal(out, ones)
            raise


@pytest.mark.parametrize("value", [0, -1, MOST, 1 << 70, 1.0, "2", True], ids=repr)
def test_a_bad_number_is_an_error_on_all_ranks(four: Pool, value: Any) -> None:
    """MOST is one more than rank 1 was made with."""
    if isinstance(value, int) and value is not True:
        alike(four.errors(bad_number, value), ValueError, f"rank 1,num_blocks,1 to 4,not {value}")
    else:
        alike(four.errors(bad_number, value), TypeError, f"rank 1,num_blocks,{value!r}")


def default_is_one(rank: int, num_ranks: int) -> None:
    with logged() as (comm, seen):
        comm.barrier()
        comm.all_to_all_single(torch.empty(num_ranks), torch.ones(num_ranks))
        assert set(seen) == {1}


def test_the_default_on_the_host(four: Pool) -> None:
    four.run(default_is_one)
