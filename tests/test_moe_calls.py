"""Dispatch and combine as calls: two steps, counts, many experts, handles and their lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.processes import Pool


def routing(
    rank: int, num_tokens: int, topk: int, num_experts: int, width: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx, topk_weights of a rank."""
    g = torch.Generator().manual_seed(100 + rank)
    idx = torch.randint(-1, num_experts, (num_tokens, topk), generator=g)
    return (
        torch.randn(num_tokens, width, generator=g),
        idx,
        torch.rand(num_tokens, topk, generator=g),
    )


def weighted(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a combine of the dispatched rows themselves gives."""
    return x * (weights * (idx >= 0)).sum(1, keepdim=True)


def message(call: Any) -> str:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- two steps -------------------------------------------------------------------------------------


def in_two_steps(rank: int, num_ranks: int) -> list[str]:
    import fastkern

    comm = fastkern.init(servers=2)
    x, idx, weights = routing(rank, 3 + rank, 3, 6)
    x.requires_grad_()
    weights.requires_grad_()
    recv, recv_weights, counts, handle = comm.dispatch(x, idx, weights, num_experts=6)
    y = comm.combine(recv * 2, handle, weights=recv_weights)
    y.square().sum().backward()
    plain = (x.grad, weights.grad)
    x.grad = weights.grad = None

    pending = comm.dispatch_start(x, idx, weights, num_experts=6)
    refused = [message(comm.barrier), message(lambda: comm.combine(recv, handle))]
    refused.append(message(lambda: comm.dispatch_start(x, idx, num_experts=6)))
    refused.append(message(lambda: comm.all_to_all_single(x, x.clone(), async_op=True)))
    recv2, recv_weights2, counts2, handle2 = pending.finish()
    assert pending.done()
    refused.append(message(pending.finish))
    assert torch.equal(recv2, recv)
    assert torch.equal(recv_weights2, recv_weights)
    assert torch.equal(counts2, counts)
    pending = comm.combine_start(recv2 * 2, handle2, weights=recv_weights2)
    y2 = pending.finish()
    assert torch.equal(y2, y)
    y2.square().sum().backward()
    assert torch.equal(x.grad, plain[0])
    assert torch.equal(weights.grad, plain[1])
    bad = comm.dispatch_start(x, idx if rank else idx + 7, num_experts=6)
    refused.append(message(bad.finish))
    comm.barrier()  # all is well afterwards
    return refused


def test_in_two_steps(four: Pool) -> None:
    for *others, twice, bad in four.run(in_two_steps):
        for text in others:
            assert text.startswith("FastkernError: dispatch_start has not been finished")
        assert twice.startswith("ValueError: finish: ")
        assert bad.startswith("ValueError: dispatch: rank 0: topk_idx[")


def closed_while_started(rank: int, num_ranks: int) -> str:
    import fastkern

    comm = fastkern.init()
    x, idx, _ = routing(rank, 4, 2, 4)
    pending = comm.dispatch_start(x, idx, num_experts=4)
    comm.close()
    recv, *_ = pending.finish()
    assert recv.shape[1] == 5
    return message(lambda: comm.dispatch(x, idx, num_experts=4))


def test_close_waits_for_what_was_started(four: Pool) -> None:
    for text in four.run(closed_while_started):
        assert text.startswith("ClosedError")


# -- counts ----------------------------------------------------------------------------------------


def with_many_experts(rank: int, num_ranks: int, num_experts: int) -> None:
    import fastkern

    comm = fastkern.init(servers=2)
    x, idx, weights = routing(rank, 20, 4, num_experts)
    recv, recv_weights, counts, handle = comm.dispatch(x, idx, weights, num_experts=num_experts)
    assert len(counts) == num_experts // num_ranks + (rank < num_experts % num_ranks)
    y = comm.combine(recv, handle, weights=recv_weights)
    torch.testing.assert_close(y, weighted(x, idx, weights))
    assert handle.num_experts == num_experts


@pytest.mark.parametrize("num_experts", [2040, 2041, 5003])
def test_more_experts_than_a_record_holds(four: Pool, num_experts: int) -> None:
    """A record holds 2046 counts; with 4 ranks on 2 servers, 2040 experts just fit."""
    four.run(with_many_experts, num_experts)


def counts_of(all_idx: list[torch.Tensor], num_experts: int, servers: int) -> Any:
    """RouteCounts by definition; experts in equal parts."""
    from fastkern.moe.counts import RouteCounts

    r = len(all_idx)
    copies = torch.zeros(r, num_experts, dtype=torch.int64)
    to_server = torch.zeros(r, servers, dtype=torch.int64)
    to_rank = torch.zeros(r, r, dtype=torch.int64)
    for s, idx in enumerate(all_idx):
        for token in idx.tolist():
            chosen = [e for e in token if e >= 0]
            ranks = {e * r // num_experts for e in chosen}
            for e in chosen:
                copies[s, e] += 1
            for d in ranks:
                to_rank[s, d] += 1
            for b in {d * servers // r for d in ranks}:
                to_server[s, b] += 1
    return RouteCounts(copies.numpy(), to_server.numpy(), to_rank.numpy())


def with_given_counts(rank: int, num_ranks: int) -> list[str]:
    import fastkern

    comm = fastkern.init(servers=2)
    inputs = [routing(r, 4 + r, 3, 8) for r in range(num_ranks)]
    x, idx, weights = inputs[rank]
    counts = counts_of([i for _, i, _ in inputs], 8, 2)
    recv, recv_weights, _, handle = comm.dispatch(x, idx, weights, num_experts=8, counts=counts)
    again, _, _, _ = comm.dispatch(x, idx, weights, num_experts=8)
    assert torch.equal(recv, again)
    y = comm.combine(recv, handle, weights=recv_weights)
    torch.testing.assert_close(y, weighted(x, idx, weights))
    wrong = counts_of([i for _, i, _ in inputs], 8, 2)
    wrong.copies[2, 1] += 1  # only rank 2 can see that
    texts = [message(lambda: comm.dispatch(x, idx, num_experts=8, counts=wrong))]
    if rank == 1:
        counts.to_rank[3, 3] += 1  # only rank 1 believes it
    texts.append(message(lambda: comm.dispatch(x, idx, num_experts=8, counts=counts)))
    comm.barrier()
    return texts


def test_given_counts_are_used_and_checked(four: Pool) -> None:
    for own, differ in four.run(with_given_counts):
        assert own == "ValueError: dispatch: rank 2: counts are not those of topk_idx"
        assert "ValueError: dispatch: arguments differ between ranks" in differ


# -- handles ---------------------------------------------------------------------------------------


def with_handles(rank: int, num_ranks: int) -> list[str]:
    import fastkern
    from fastkern.moe import plans
    from fastkern.moe.handle import Handle

    comm = fastkern.init(servers=2)
    plans._PLANS_KEPT = 3
    x, idx, weights = routing(rank, 5 + rank, 3, 8)
    recv, recv_weights, counts, handle = comm.dispatch(
        x, idx, weights, num_experts=8, host_counts=False
    )
    assert handle.tokens_per_expert_list is None
    assert torch.equal(handle.tokens_per_expert, counts)
    assert (handle.num_tokens, handle.topk, handle.layout) == (5 + rank, 3, "expert")
    assert handle.num_recv_rows == len(recv)
    assert handle.nbytes == 8 * handle.meta.numel()
    y = comm.combine(recv, handle, weights=recv_weights)
    for k in range(8):  # until its plan has been forgotten, and longer
        other, _, _, _ = comm.dispatch(x[: k % 3], idx[: k % 3], num_experts=8)
        assert len(other) >= 0
    assert torch.equal(comm.combine(recv, handle, weights=recv_weights), y)
    # Other rows on the same routes: wider, of two tensors, of another dtype.
    ids = torch.arange(len(x), dtype=torch.int32) + 100 * rank
    wide = x.double().repeat(1, 7)
    (got, got_ids), none, again_counts, again = comm.dispatch([wide, ids], handle=handle)
    assert none is None
    assert torch.equal(again_counts, counts)
    assert again.meta is handle.meta
    assert torch.equal(got, recv.double().repeat(1, 7))
    assert got_ids.dtype == torch.int32
    _, same_weights, _, _ = comm.dispatch(x, None, weights, handle=handle)
    assert torch.equal(same_weights, recv_weights)
    wide_y = comm.combine(got.float(), handle, weights=recv_weights)
    assert torch.equal(wide_y, y.repeat(1, 7))

    mine = fastkern.Communicator(servers=2)
    texts = [message(lambda: mine.combine(recv, handle))]
    mine.barrier()
    mine.close()
    texts.append(message(lambda: comm.dispatch(x, idx, handle=handle)))
    texts.append(message(lambda: comm.dispatch(x[:1], handle=handle)))
    older = comm.dispatch(x, idx, num_experts=8)[3]
    texts.append(message(lambda: comm.combine(recv, older if rank == 3 else handle)))
    texts.append(message(lambda: comm.combine(recv, handle.meta[:3])))
    texts.append(message(lambda: comm.combine(recv, torch.zeros(40, dtype=torch.int64))))
    cut = handle.meta[:-1]  # a good header, but not all that it speaks of
    texts.append(message(lambda: comm.combine(recv, Handle(cut) if rank == 1 else handle)))
    texts.append(message(lambda: comm.dispatch(x, handle=Handle(cut) if rank == 1 else handle)))
    if rank == 2:
        handle.release()
    texts.append(message(lambda: comm.combine(recv, handle)))
    comm.barrier()
    return texts


def test_handles(four: Pool) -> None:
    expected = (
        "ValueError: combine: ranks 0, 1, 2, 3: handle: made by another communicator",
        "ValueError: dispatch: ranks 0, 1, 2, 3: topk_idx and handle: the handle has the routing",
        "ValueError: dispatch: rank 0: x has 1 tokens, but the handle's call had 5; rank 1: x",
        "ValueError: combine: arguments differ between ranks",
        "ValueError: combine: ranks 0, 1, 2, 3: handle: not the metadata of a dispatch",
        "ValueError: combine: ranks 0, 1, 2, 3: handle: not the metadata of a dispatch",
        "ValueError: combine: rank 1: handle: its metadata has ",
        "ValueError: dispatch: rank 1: handle: its metadata has ",
        "ValueError: combine: rank 2: handle: it has been released",
    )
    for texts in four.run(with_handles):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), text


def with_too_many_partials(rank: int, num_ranks: int) -> list[str]:
    from fastkern import Communicator
    from fastkern.moe.handle import header_of

    with Communicator(servers=2) as comm:
        x, idx, weights = routing(rank, 4, 3, 8)
        recv, got, _, handle = comm.dispatch(x, idx, weights, num_experts=8)
        header = header_of(handle.meta)
        true = int(header["num_partials"])
        if rank == 3:
            header["num_partials"] = (1 << 32) - 1
        texts = [message(lambda: comm.combine(recv, handle, weights=got))]
        header["num_partials"] = true
        torch.testing.assert_close(
            comm.combine(recv, handle, weights=got), weighted(x, idx, weights)
        )
    return texts


def test_more_partial_rows_than_can_be_numbered(four: Pool) -> None:
    """They are refused on every rank, and the communicator works afterwards."""
    outcomes = four.run(with_too_many_partials)
    assert all(texts == outcomes[0] for texts in outcomes)
    assert outcomes[0][0].startswith("ValueError: combine: ")
    assert "partial rows on one rank" in outcomes[0][0]
