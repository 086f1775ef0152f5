"""Static exchanges of few tokens, as in decoding: launch to done, from a graph and eager."""

from __future__ import annotations

import torch

from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_static import VirtualStatic
from fastkern.moe.static_shape import StaticShape
from tests.device.virtual_static_cases import StaticCase

from .bench import Bench
from .timing import Timer

_TOKENS = (1, 16, 128)
_SHAPE = (2, 4)
_NUM_RANKS = 8
_TOPK, _NUM_EXPERTS = 8, 256
_FLUSHES = 8  # eager ones are more work for the host than a launch of a persistent kernel
_TOLERANCE = 2.0**-7  # of a bf16 and its sum's rounding


def static_latencies(bench: Bench) -> None:
    """Static dispatch alone, and with the combine, of 1, 16 and 128 tokens per rank on 8 ranks,
    planned on the device. One exchange for all, made for the most tokens that memory allows."""
    most = bench.most_blocks()
    for blocks in sorted({min(2, most), min(8, most)}):
        with bench.cluster(_SHAPE, blocks) as cluster:
            timer = bench.timer(cluster, _FLUSHES)
            for combine in (False, True):
                shape, counts = _shape(bench, combine)
                exchange = cluster.static_exchange(shape, entry_timeout_s=10.0)
                for tokens in counts:
                    _measure(bench, cluster, timer, exchange, tokens, blocks)
                exchange.close()
            timer.close()


def _shape(bench: Bench, combine: bool) -> tuple[StaticShape, list[int]]:
    """The exchange for the most tokens of which outputs take less than half of the memory, and the
    numbers of tokens up to them."""
    memory = bench.session.driver.properties().memory_bytes
    for k in range(len(_TOKENS), 0, -1):
        shape = StaticCase(
            topk=_TOPK,
            num_experts=_NUM_EXPERTS,
            most=_TOKENS[k - 1],
            dtypes=(torch.bfloat16,),
            width=bench.scale.hidden,
            combine=combine,
        ).shape(_NUM_RANKS)
        if sum(shape.most_rows(_NUM_RANKS)) * shape.format.row_bytes < memory // 2:
            return shape, list(_TOKENS[:k])
    raise MemoryError(f"{memory} bytes on the device, too few for one token per rank")


def _measure(
    bench: Bench,
    cluster: VirtualCluster,
    timer: Timer,
    exchange: VirtualStatic,
    tokens: int,
    blocks: int,
) -> None:
    """Of one number of tokens. Only one rank's outputs are cleared in what is measured: as many as
    a rank with a device of its own would clear."""
    x, idx, weights = _inputs(bench, tokens)
    exchange.write([[x]] * _NUM_RANKS, idx, weights)
    exchange.run()
    exchange.capture(cleared=[0])
    ways = (("graph", exchange.enqueue_replay), ("eager", lambda: exchange.enqueue([0])))
    name = "dispatch" if exchange.shape.expert_dtype is None else "dispatch+combine"
    for way, enqueue in ways:
        device, host = timer.on_device(enqueue), timer.on_host(enqueue)
        exchange.finish()
        case = f"{name}, {tokens} tokens, {blocks} blocks, {way}"
        _check(exchange, x, idx, weights, case)
        bench.add("static exchange", case, device, host_p50_us=host.p50_us)


def _inputs(
    bench: Bench, tokens: int
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(bench.session.seed)
    x = torch.randn(tokens, bench.scale.hidden, generator=rng).to(torch.bfloat16)
    ranks = range(_NUM_RANKS)
    drawn = [torch.rand(tokens, _NUM_EXPERTS, generator=rng).argsort(1) for _ in ranks]
    idx = [chosen[:, :_TOPK].contiguous() for chosen in drawn]
    return x, idx, [torch.rand(tokens, _TOPK, generator=rng) for _ in ranks]


def _check(
    exchange: VirtualStatic,
    x: torch.Tensor,
    idx: list[torch.Tensor],
    weights: list[torch.Tensor],
    what: str,
) -> None:
    """Counts are right, and sums near enough: bits are the business of the correctness cases."""
    counts = torch.bincount(torch.cat(idx).view(-1), minlength=_NUM_EXPERTS)
    if not torch.equal(torch.cat(exchange.read_tokens_per_expert()), counts):
        raise AssertionError(f"{what}: wrong tokens_per_expert")
    if exchange.shape.expert_dtype is None:
        return
    for rank, got in enumerate(exchange.read_sums()):
        right = x.float() * weights[rank].sum(1, keepdim=True)
        if not bool(((got.float() - right).abs() <= _TOLERANCE * right.abs() + 1e-6).all()):
            raise AssertionError(f"{what}: wrong sums on rank {rank}")
