"""Faults that other MoE libraries shipped, in small: each with the right value written out.

Ranks as processes. Rank r's token t holds the number 100 * r + t unless a case says otherwise.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastkern import Communicator
from tests.conftest import SharedPools
from tests.moe_checks import as_bytes
from tests.processes import Pool

NAN = float("nan")
CANARY = 0xC5
LAYOUTS = ("expert", "rank")


def numbered(rank: int, num_tokens: int, width: int = 3) -> Tensor:
    """[num_tokens, width] of 100 * rank + token."""
    return (100.0 * rank + torch.arange(num_tokens))[:, None].repeat(1, width)


def equal(got: Tensor, right: object, what: str = "") -> None:
    """The tensor, as lists, is this; says what it is instead, which asserts in workers do not."""
    assert got.tolist() == right, f"{what}: {got.tolist()}, not {right}"


# -- F05: no tokens --------------------------------------------------------------------------------


def no_tokens(rank: int, num_ranks: int, servers: int) -> None:
    """Six experts on rank 0, which has no tokens; the others send it four each."""
    num_tokens = 4 if rank else 0
    topk_idx = torch.arange(6).repeat(num_tokens, 1)
    weights = torch.arange(1.0, 7).repeat(num_tokens, 1)
    tokens = [100.0 * r + t for r in (1, 2, 3) for t in range(4)] if rank == 0 else []
    options = {"num_experts": 6, "expert_to_rank": [0] * 6}
    with Communicator(servers=servers, entry_timeout_s=50) as comm:
        x = numbered(rank, num_tokens)
        recv, recv_weights, counts, handle = comm.dispatch(x, topk_idx, weights, **options)
        equal(recv[:, 2], tokens * 6, "rows by expert")
        equal(counts, [12] * 6 if rank == 0 else [], "counts")
        equal(recv_weights, [w for w in range(1, 7) for _ in tokens], "weights")
        sums = comm.combine(recv, handle, weights=recv_weights)
        equal(sums, [[21.0 * (100 * rank + t)] * 3 for t in range(num_tokens)], "sums")
        assert sums.shape == (num_tokens, 3), sums.shape
        recv, recv_weights, counts, handle = comm.dispatch(
            x, topk_idx, weights, layout="rank", **options
        )
        equal(recv[:, 0], tokens, "distinct tokens")
        equal(handle.recv_topk_idx, [[0, 1, 2, 3, 4, 5]] * len(tokens), "local experts")
        equal(recv_weights, [[1, 2, 3, 4, 5, 6]] * len(tokens), "weights by rank")
        equal(counts, [12] * 6 if rank == 0 else [], "counts by rank")
        sums = comm.combine(recv, handle, weights=recv_weights.sum(1))
        equal(sums, [[21.0 * (100 * rank + t)] * 3 for t in range(num_tokens)], "sums by rank")


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_f05_a_rank_without_tokens_that_owns_all(four: Pool, servers: int) -> None:
    four.run(no_tokens, servers)


def one_token_in_all(rank: int, num_ranks: int) -> None:
    """Rank 5 has the only token; experts 3, 8 and 15 are on ranks of three servers."""
    with Communicator(servers=4, entry_timeout_s=100) as comm:
        for layout in LAYOUTS:
            num_tokens = int(rank == 5)
            topk_idx = torch.tensor([15, 3, 8]).repeat(num_tokens, 1)
            recv, _, counts, handle = comm.dispatch(
                numbered(rank, num_tokens), topk_idx, num_experts=16, layout=layout
            )
            equal(recv, [[500.0] * 3] if rank in (3, 8, 15) else [], layout)
            equal(counts, [int(rank in (3, 8, 15))], layout)
            sums = comm.combine(recv + rank, handle)
            equal(sums, [[3 * 500.0 + 26] * 3] if rank == 5 else [], layout)


def test_f05_one_token_among_sixteen_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Pool(16, tmp_path_factory.mktemp("sixteen")) as sixteen:
        sixteen.run(one_token_in_all, timeout_s=200)


# -- F06: masked slots -----------------------------------------------------------------------------


def masked_slots(rank: int, num_ranks: int, servers: int, layout: str) -> int:
    """Rank 0's slots: none, 0; 3, none; none at all. Rank 1 has none. Rows sent between servers."""
    topk_idx = torch.tensor([[-1, 0], [3, -1], [-1, -1]] if rank == 0 else [[-1, -1]])
    weights = torch.tensor([[NAN, 0.5], [0.25, NAN], [NAN, NAN]] if rank == 0 else [[NAN, NAN]])
    with Communicator(servers=servers, entry_timeout_s=50) as comm:
        recv, recv_weights, counts, handle = comm.dispatch(
            numbered(rank, len(topk_idx)), topk_idx, weights, num_experts=4, layout=layout
        )
        equal(recv, [[float(rank)] * 3], "rows")
        equal(counts, [1, 0] if rank == 0 else [0, 1], "counts")
        by_rank = [[0, 0.5]] if rank == 0 else [[0.25, 0]]
        equal(
            recv_weights, by_rank if layout == "rank" else [0.5 if rank == 0 else 0.25], "weights"
        )
        if layout == "rank":
            equal(handle.recv_topk_idx, [[-1, 0]] if rank == 0 else [[1, -1]], "local experts")
            recv_weights = recv_weights.sum(1)
        outs = torch.full((1, 3), 8.0 if rank == 0 else 16.0)
        sums = comm.combine(outs, handle, weights=recv_weights)
        equal(sums, [[4.0] * 3, [4.0] * 3, [0.0] * 3] if rank == 0 else [[0.0] * 3], "sums")
        sums = comm.combine(outs, handle, bias=torch.tensor([1.0, 2.0, 3.0]))
        alone = [[1.0, 2.0, 3.0]]
        equal(sums, [[9, 10, 11], [17, 18, 19], *alone] if rank == 0 else alone, "with bias")
        return int(handle.stats.scale_out_rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("servers", [1, 2])
def test_f06_masked_slots_are_nowhere(shared_pools: SharedPools, servers: int, layout: str) -> None:
    sent = shared_pools.pool(2).run(masked_slots, servers, layout)
    assert sent == [servers - 1, 0], "only the token of expert 3 leaves its server"


# -- F07: uneven owners ----------------------------------------------------------------------------


def uneven_owners(rank: int, num_ranks: int, servers: int, owned: list[int]) -> None:
    """Every rank has one token that goes to every expert; expert e adds e."""
    num_experts, mine = sum(owned), owned[rank]
    first = sum(owned[:rank])
    topk_idx = torch.arange(num_experts)[None].flip(1)
    everyone = [100.0 * r for r in range(num_ranks)]
    with Communicator(servers=servers, entry_timeout_s=50) as comm:
        recv, _, counts, handle = comm.dispatch(
            numbered(rank, 1), topk_idx, num_experts=num_experts
        )
        equal(counts, [num_ranks] * mine, "counts")
        equal(recv[:, 0], everyone * mine, "rows")
        experts = first + torch.arange(mine).repeat_interleave(num_ranks)
        right = num_experts * 100.0 * rank + num_experts * (num_experts - 1) / 2
        equal(comm.combine(recv + experts[:, None], handle), [[right] * 3], "sums")
        recv, _, counts, handle = comm.dispatch(
            numbered(rank, 1), topk_idx, num_experts=num_experts, layout="rank"
        )
        equal(counts, [num_ranks] * mine, "counts by rank")
        equal(recv[:, 0], everyone if mine else [], "rows by rank")
        added = float(sum(range(first, first + mine)))
        equal(comm.combine(mine * recv + added, handle), [[right] * 3], "sums by rank")


@pytest.mark.parametrize(
    ("num_ranks", "servers", "owned"),
    [
        (8, 2, [4, 4, 4, 4, 4, 4, 3, 3]),
        (8, 4, [4, 4, 4, 4, 4, 4, 3, 3]),
        (4, 1, [2, 1, 1, 1]),
        (4, 2, [2, 1, 1, 1]),
        (4, 2, [1, 1, 1, 0]),
        (4, 4, [1, 1, 1, 0]),
        (3, 1, [3, 2, 2]),
        (3, 3, [3, 2, 2]),
    ],
)
def test_f07_uneven_owners(
    shared_pools: SharedPools, num_ranks: int, servers: int, owned: list[int]
) -> None:
    shared_pools.pool(num_ranks).run(uneven_owners, servers, owned)


# -- F08: odd widths -------------------------------------------------------------------------------

WIDTHS = (1, 7, 8, 24, 129, 1368, 1536, 2880, 3584, 7168)
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def with_tail(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor [num_rows, width] to write into, and the 16 bytes behind each of its rows."""
    row_bytes = width * dtype.itemsize
    padded = -(-row_bytes // dtype.itemsize) * dtype.itemsize + 16
    whole = torch.full((num_rows, padded), CANARY, dtype=torch.uint8)
    return whole.view(dtype)[:, :width], whole[:, row_bytes:]


def drawn(rank: int, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, exact in every dtype and in every sum of two."""
    generator = torch.Generator().manual_seed(10 * width + rank)
    return torch.randint(-8, 9, (num_tokens, width), generator=generator).to(dtype)


def odd_widths(rank: int, num_ranks: int, name: str, strided: bool) -> None:
    """Token t of rank r goes to ranks r + 1 and r + t; one expert per rank."""
    dtype = DTYPES[name]
    topk_idx = torch.tensor([[(rank + 1) % num_ranks, (rank + t) % num_ranks] for t in range(3)])
    senders = [
        (r, t)
        for r in range(num_ranks)
        for t in range(3)
        for to in ((r + 1) % num_ranks, (r + t) % num_ranks)
        if to == rank
    ]
    with Communicator(servers=2, entry_timeout_s=50) as comm:
        for width in WIDTHS:
            what = f"{name}, width {width}"
            sources = [drawn(r, 3, width, dtype) for r in range(num_ranks)]
            right = torch.stack([as_bytes(sources[r][t]) for r, t in senders])
            out, tail = with_tail(len(senders), width, dtype)
            if not strided:
                out = out.contiguous()
            recv, _, _, handle = comm.dispatch(
                sources[rank], topk_idx, num_experts=num_ranks, out=out
            )
            assert torch.equal(torch.stack([as_bytes(row) for row in out]), right), what
            assert torch.equal(as_bytes(recv), as_bytes(out)), what
            assert (tail == CANARY).all(), f"{what}: bytes behind rows overwritten"
            if dtype.itemsize == 1:
                continue  # not summed
            sums, tail = with_tail(3, width, dtype)
            if not strided:
                sums = sums.contiguous()
            comm.combine(recv, handle, out=sums)
            assert torch.equal(sums, 2 * sources[rank]), what
            assert (tail == CANARY).all(), f"{what}: bytes behind sums overwritten"


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", DTYPES)
def test_f08_odd_widths_leave_the_bytes_behind_rows(four: Pool, name: str, strided: bool) -> None:
    four.run(odd_widths, name, strided)


# -- F09: one hot expert ---------------------------------------------------------------------------


def one_hot_expert(rank: int, num_ranks: int, servers: int, most: int | None, layout: str) -> None:
    """32 tokens of each of eight ranks, all to the last of 16 experts."""
    x = numbered(rank, 32, 4)
    everyone = [100.0 * r + t for r in range(8) for t in range(32)] if rank == 7 else []
    used = len(everyone)
    with Communicator(servers=servers, entry_timeout_s=50) as comm:
        recv, _, counts, handle = comm.dispatch(
            x,
            torch.full((32, 1), 15),
            num_experts=16,
            layout=layout,
            num_max_tokens_per_rank=most,
        )
        assert len(recv) == (used if most is None else 8 * most), len(recv)
        equal(recv[:used, 3], everyone, "rows")
        equal(counts, [0, 256] if rank == 7 else [0, 0], "counts")
        outs = torch.full((len(recv), 4), NAN)
        outs[:used] = 2 * recv[:used]
        equal(comm.combine(outs, handle), (2 * x).tolist(), "sums")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [None, 32, 40])
@pytest.mark.parametrize("servers", [1, 2, 8])
def test_f09_one_hot_expert(
    shared_pools: SharedPools, servers: int, most: int | None, layout: str
) -> None:
    shared_pools.pool(8).run(one_hot_expert, servers, most, layout)


# -- F10: bf16 sums --------------------------------------------------------------------------------


def bf16_sums(rank: int, num_ranks: int, servers: int, first: bool) -> None:
    """Rank 2's token has eight experts, which give 256 once and 1 seven times: 263."""
    num_tokens = int(rank == 2)
    topk_idx = torch.arange(8).repeat(num_tokens, 1)
    big = 0 if first else 7
    for placed in ([0] * 8, [2] * 8, [0, 0, 1, 1, 2, 2, 3, 3], [3, 2, 1, 0, 3, 2, 1, 0]):
        mine = [e for e in range(8) if placed[e] == rank]
        values = torch.tensor([[256.0 if e == big else 1.0] for e in mine]).reshape(-1, 1)
        with Communicator(servers=servers, entry_timeout_s=50) as comm:
            _, _, _, handle = comm.dispatch(
                torch.zeros(num_tokens, 1), topk_idx, num_experts=8, expert_to_rank=placed
            )
            ones = torch.ones(len(mine))
            for weights in (None, ones):
                for wire_dtype in (None, torch.float32):
                    sums = comm.combine(
                        values.bfloat16(), handle, weights=weights, wire_dtype=wire_dtype
                    )
                    equal(sums, [[264.0]] * num_tokens, f"{placed}, {wire_dtype}")
            equal(comm.combine(values, handle, weights=ones), [[263.0]] * num_tokens, "fp32")


@pytest.mark.parametrize("first", [True, False], ids=["256 first", "256 last"])
@pytest.mark.parametrize("servers", [1, 2])
def test_f10_bf16_sums_are_fp32_inside(four: Pool, servers: int, first: bool) -> None:
    four.run(bf16_sums, servers, first)
