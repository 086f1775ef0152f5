"""The dispatch manager for Megatron-LM: driven as its dispatcher would, against a dense layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastkern
from fastkern.integrations import megatron
from tests import megatron_double as double
from tests.processes import Pool

NUM_RANKS = 4
HIDDEN, INNER = 24, 16
TIMEOUT_S = 180.0  # the first case also waits for its ranks to start


@dataclass(frozen=True)
class Case:
    """One layer on four ranks. tokens: of each rank; alignment: of FP8 experts, 0 without."""

    routing: str = "random"
    dtype: torch.dtype = torch.float32
    tokens: tuple[int, ...] = (8, 8, 8, 8)
    num_experts: int = 8
    topk: int = 3
    alignment: int = 0
    servers: int = 2
    tp_size: int = 1
    shared: float = 0.0
    layer: str = "plain"
    backend: str = "ncclep"

    @property
    def num_local(self) -> int:
        """Experts of a rank, shards counted."""
        return self.num_experts * self.tp_size // NUM_RANKS

    @property
    def padded(self) -> int:
        """What the manager is to pad the rows of an expert to."""
        return max(1, self.alignment) if self.backend == "ncclep" else 1

    def experts_of(self, rank: int) -> range:
        first = rank // self.tp_size * self.num_local
        return range(first, first + self.num_local)

    def shard(self, rank: int) -> slice:
        """The inner columns of its experts that a rank holds."""
        size = INNER // self.tp_size
        return slice(rank % self.tp_size * size, (rank % self.tp_size + 1) * size)


class Data(NamedTuple):
    """Per rank x [T, H], scores [T, E], map [T, E] and grad [T, H]; w1 [E, H, F], w2 [E, F, H]."""

    xs: list[Tensor]
    scores: list[Tensor]
    maps: list[Tensor]
    grads: list[Tensor]
    w1: Tensor
    w2: Tensor


def make_data(case: Case, seed: int = 0) -> Data:
    """All ranks' data, the same wherever it is made."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random) * scale).to(case.dtype)

    scores = [torch.randn(t, case.num_experts, generator=random) for t in case.tokens]
    return Data(
        [normal(t, HIDDEN) for t in case.tokens],
        scores,
        [_choose(case, score) for score in scores],
        [normal(t, HIDDEN) for t in case.tokens],
        normal(case.num_experts, HIDDEN, INNER, scale=HIDDEN**-0.5),
        normal(case.num_experts, INNER, HIDDEN, scale=INNER**-0.5),
    )


def _choose(case: Case, scores: Tensor) -> Tensor:
    """The routing map; may change scores."""
    preference = scores.clone()
    if case.routing == "hot":  # all choose expert 1, none those of the last rank
        preference[:, 1] += 100
        preference[:, case.num_experts * 3 // 4 :] -= 100
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, preference.topk(case.topk, dim=1).indices, True)
    if case.routing == "dropped":
        chosen &= chosen.cumsum(0) <= 2  # a capacity of two tokens per expert and source rank
        chosen[0] = False
        chosen[1] = False
        chosen[1, 5] = True  # with a probability of exactly zero, and routed all the same
        scores[1, 5] = -200
    return chosen


# -- the layer, dense and exchanged ----------------------------------------------------------------


class Result(NamedTuple):
    """Of one rank. rows, probs, counts: what its experts got; the rest as the names say."""

    y: Tensor
    grad_x: Tensor
    grad_scores: Tensor
    grad_w1: Tensor
    grad_w2: Tensor
    rows: Tensor
    probs: Tensor
    counts: Tensor


def dense(case: Case, data: Data) -> list[Result]:
    """Every rank's result, by one process in float64 that knows no ranks."""
    w1, w2 = (w.double().requires_grad_() for w in (data.w1, data.w2))
    xs = [x.double().requires_grad_() for x in data.xs]
    scores = [score.double().requires_grad_() for score in data.scores]
    ys = []
    for x, score, chosen, grad in zip(xs, scores, data.maps, data.grads, strict=True):
        inner = torch.nn.functional.silu(torch.einsum("th,ehf->tef", x, w1))
        weights = score.sigmoid() * chosen
        ys.append(torch.einsum("tef,te,efh->th", inner, weights, w2) + case.shared * x)
        ys[-1].backward(grad.double())
    assert w1.grad is not None
    assert w2.grad is not None
    results = []
    for rank in range(NUM_RANKS):
        own, shard = case.experts_of(rank), case.shard(rank)
        grads = (w1.grad[own.start : own.stop, :, shard], w2.grad[own.start : own.stop, shard])
        mine = ys[rank].detach(), xs[rank].grad, scores[rank].grad
        results.append(Result(*mine, *grads, *received(case, data, rank)))
    return results


def received(case: Case, data: Data, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank's experts are to get, exactly: rows, probabilities, rows per expert."""
    rows, probs, counts = [], [], []
    for expert in case.experts_of(rank):
        taken = [chosen[:, expert] for chosen in data.maps]
        found = torch.cat([x[t] for x, t in zip(data.xs, taken, strict=True)])
        weights = torch.cat([p[t, expert] for p, t in zip(_probs(data), taken, strict=True)])
        padding = -len(found) % case.padded
        rows += [found, found.new_zeros(padding, HIDDEN)]
        probs += [weights, weights.new_zeros(padding)]
        counts.append(len(found) + padding)
    return torch.cat(rows), torch.cat(probs), torch.tensor(counts)


def _probs(data: Data) -> list[Tensor]:
    return [s.sigmoid() * chosen for s, chosen in zip(data.scores, data.maps, strict=True)]


def on_rank(rank: int, num_ranks: int, case: Case, micro_batches: int = 1) -> list[Result]:
    """The layer on one rank, per micro-batch: first all forwards, then all backwards."""
    fastkern.init(servers=case.servers)
    dispatcher = make_dispatcher(case)
    dispatcher.shared = case.shared
    all_data = [make_data(case, seed) for seed in range(micro_batches)]
    own, shard = case.experts_of(rank), case.shard(rank)
    experts = [
        double.Experts(
            data.w1[own.start : own.stop, :, shard],
            data.w2[own.start : own.stop, shard],
            case.padded,
        )
        for data in all_data
    ]
    layers, inputs, outputs, got = [], [], [], []
    for data, expert in zip(all_data, experts, strict=True):
        x = data.xs[rank].unsqueeze(1).requires_grad_()  # [sequence, batch, hidden]
        scores = data.scores[rank].requires_grad_()
        layers.append(double.LAYERS[case.layer](dispatcher, expert))
        y = layers[-1].forward(x, data.maps[rank], scores.sigmoid() * data.maps[rank])
        inputs.append((x, scores))
        outputs.append(y.detach().clone())
        got.append(expert.got)
    results = []
    for i, data in enumerate(all_data):
        layers[i].backward(data.grads[rank].unsqueeze(1))
        (x, scores), e = inputs[i], experts[i]
        assert x.grad is not None
        gradients = x.grad.squeeze(1), scores.grad, e.w1.grad, e.w2.grad
        results.append(Result(outputs[i].squeeze(1), *gradients, *got[i]))
    return results


def make_dispatcher(case: Case) -> double.MoEFlexTokenDispatcher:
    """Megatron's dispatcher, which makes fastkern's manager because that is enabled."""
    config = double.Config(
        case.num_experts,
        case.topk,
        moe_flex_dispatcher_backend=case.backend,
        quantized_alignment=case.alignment,
    )
    rank = dist.get_rank()
    groups = double.Groups(dist.group.WORLD, case.tp_size, NUM_RANKS // case.tp_size)
    with double.installed():
        megatron.enable(case.backend)
        try:
            return double.MoEFlexTokenDispatcher(
                case.num_local, case.experts_of(rank), config, groups
            )
        finally:
            megatron.disable()


def check(case: Case, results: list[list[Result]]) -> None:
    """results: [rank][micro-batch]."""
    tolerance = 2e-5 if case.dtype == torch.float32 else 4e-2
    for seed in range(len(results[0])):
        wanted = dense(case, make_data(case, seed))
        for rank, right in enumerate(wanted):
            result = results[rank][seed]
            for name in ("rows", "probs", "counts"):
                got, exact = getattr(result, name), getattr(right, name)
                assert got.dtype == exact.dtype, f"rank {rank}: {name}"
                assert torch.equal(got, exact), f"rank {rank}: {name} {got} is not {exact}"
            for name in ("y", "grad_x", "grad_scores", "grad_w1", "grad_w2"):
                got, near = getattr(result, name), getattr(right, name)
                torch.testing.assert_close(
                    got.double(), near, rtol=tolerance, atol=tolerance, msg=f"rank {rank}: {name}"
                )


CASES = {
    "random": Case(),
    "bf16": Case(dtype=torch.bfloat16),
    "hot": Case("hot", tokens=(9, 7, 12, 5)),
    "hot bf16 padded": Case("hot", torch.bfloat16, tokens=(9, 7, 12, 5), alignment=16),
    "dropped": Case("dropped", tokens=(8, 6, 9, 7)),
    "dropped padded": Case("dropped", tokens=(8, 6, 9, 7), alignment=8),
    "zero tokens": Case(tokens=(0, 6, 3, 0)),
    "zero tokens padded": Case(tokens=(0, 6, 3, 0), alignment=8, servers=1),
    "no tokens": Case(tokens=(0, 0, 0, 0)),
    "one expert per rank": Case(num_experts=4, topk=2, servers=4),
    "every expert": Case(num_experts=4, topk=4),
    "tensor parallel": Case(tp_size=2),
    "tensor parallel bf16": Case("hot", torch.bfloat16, tokens=(3, 8, 8, 1), tp_size=2),
    "shared expert": Case("dropped", shared=0.5),
    "deepep": Case(backend="deepep", alignment=8),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_dense(four: Pool, name: str) -> None:
    """Rows, probabilities and counts exactly; outputs and gradients up to rounding."""
    check(CASES[name], four.run(on_rank, CASES[name], timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("layer", double.LAYERS)
@pytest.mark.parametrize("routing", ["hot", "dropped"])
def test_ways_to_run_a_layer(four: Pool, layer: str, routing: str) -> None:
    """Two micro-batches in flight through one dispatcher, however Megatron runs them."""
    case = Case(routing, tokens=(4, 7, 2, 5), alignment=4, layer=layer)
    check(case, four.run(on_rank, case, 2, timeout_s=TIMEOUT_S))


def too_many(rank: int, num_ranks: int) -> None:
    """One rank's map sends a token to more experts than the router may choose."""
    fastkern.init(servers=2)
    dispatcher = make_dispatcher(Case(topk=2))
    chosen = torch.zeros(3, 8, dtype=torch.bool)
    chosen[:, 0] = True
    if rank == 2:
        chosen[1, 4:7] = True
    tokens, probs = dispatcher.dispatch_preprocess(torch.ones(3, HIDDEN), chosen, chosen.float())
    dispatcher.token_dispatch(tokens, probs)


def test_too_many_experts_raise_on_every_rank(four: Pool) -> None:
    errors = four.errors(too_many, timeout_s=TIMEOUT_S)
    assert [type(error) for error in errors] == [ValueError] * NUM_RANKS
    assert "sends token 1 to more than router_topk=2 experts" in str(errors[2])
    assert "rank 2" in str(errors[0])
