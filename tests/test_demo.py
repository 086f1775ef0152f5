"""The demo's layer, its checks against wrong rows, its counts, text and training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from fastkern.demo.check import check_results, check_rows_sent, close_rows, same_rows
from fastkern.demo.errors import DemoError
from fastkern.demo.model import ModelSizes
from fastkern.demo.options import Options, TrainOptions
from fastkern.demo.pretrain import train
from fastkern.demo.results import slowest_s
from fastkern.demo.rows import count_rows
from fastkern.demo.run import run_demo
from fastkern.demo.shaped import PER_CHOICE, PER_SERVER, plan_for, topology_of
from fastkern.demo.text import CONTEXT_BYTES, contexts, read_text, slices, split
from fastkern.moe.placement import Placement
from fastkern.transports import shaped
from tests.demo_cases import LAYER_CASES, LayerCase, as_result, run_copies, run_layer
from tests.moe_routing import Routing
from tests.processes import Pool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- the layer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LAYER_CASES, ids=str)
def test_spread_equals_whole(four: Pool, case: LayerCase) -> None:
    wholes, results = case.wholes(), four.run(run_layer, case)
    check_results(wholes, results)
    counts = count_rows([w.topk_idx for w in wholes], case.servers, case.placement)
    check_rows_sent(counts, results)
    assert counts.choices.sum() == sum(case.num_tokens) * case.top_k
    layer = case.layer()
    for rank, whole in enumerate(wholes):
        x = case.tokens(rank)
        for t in range(0, len(x), 7):  # the layer once more, by its definition
            best = layer.gate.scores(x[t]).topk(case.top_k)
            expected = sum(
                w * layer.experts[str(int(e))](x[t])
                for w, e in zip(best.values.softmax(0), best.indices, strict=True)
            )
            torch.testing.assert_close(whole.output[t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", LAYER_CASES, ids=str)
def test_copies_equal_whole(four: Pool, case: LayerCase) -> None:
    for whole, ways in zip(case.wholes(), four.run(run_copies, case), strict=True):
        for received, output in ways:
            same_rows("received", received, whole.received)
            close_rows("output", output, whole.output)


# -- checks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("topk_idx", "experts chosen"),
        ("topk_weights", "weights"),
        ("received", "rows received for its experts"),
        ("received_weights", "weights received with them"),
        ("output", "the layer's output"),
    ],
)
def test_one_wrong_bit_is_found(field: str, text: str) -> None:
    wholes = LayerCase(2, 6, 3, (30, 31, 32, 33)).wholes()
    results = [as_result(w) for w in wholes]
    check_results(wholes, results)
    wrong = getattr(results[2], field)
    wrong[5:].view(torch.int32).flatten()[0] ^= 1  # the lowest bit
    with pytest.raises(DemoError, match=f"rank 2, {text}: 1 of {len(wrong)} rows differ.*row 5$"):
        check_results(wholes, results)


def test_rows_in_another_order_are_found() -> None:
    wholes = LayerCase(2, 6, 3, (30, 31, 32, 33)).wholes()
    results = [as_result(w) for w in wholes]
    results[1] = replace(results[1], received=results[1].received.flip(0))
    with pytest.raises(DemoError, match="rank 1, rows received"):
        check_results(wholes, results)


def test_same_rows_compares_bytes() -> None:
    odd = torch.tensor([[0.0, float("nan")]])
    same_rows("it", odd, odd.clone())
    same_rows("it", torch.empty(0, 4), torch.empty(0, 4))
    for other in (torch.tensor([[-0.0, float("nan")]]), odd.double(), odd.view(2, 1)):
        with pytest.raises(DemoError, match="it: "):
            same_rows("it", other, odd)


def test_close_rows_allows_rounding_only() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    close_rows("it", rows * (1 + 1e-6), rows)
    for wrong in (rows + torch.tensor([[0.0, 0.0], [1e-3, 0.0]]), rows / torch.tensor([[1], [0]])):
        with pytest.raises(DemoError, match="it: 1 of 2 rows differ, first row 1"):
            close_rows("it", wrong, rows)
    with pytest.raises(DemoError, match="instead of"):
        close_rows("it", rows.double(), rows)


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_rows_are_counted_as_defined(servers: int) -> None:
    torch.manual_seed(servers)
    topk_idx = [torch.randint(0, 9, (n, 3)) for n in (5, 0, 8, 2)]
    routing = Routing(servers, topk_idx, 9)
    counts = count_rows(topk_idx, servers, Placement(9, 4))
    assert counts.tokens_across == routing.num_scale_out_rows
    assert counts.per_expert.tolist() == [n for rank in range(4) for n in routing.counts(rank)]
    assert counts.choices.sum(0).tolist() == [routing.num_rows(rank) for rank in range(4)]
    expected = np.zeros((4, 4), dtype=np.int64)
    for source in range(4):
        for token in range(routing.num_tokens(source)):
            for peer in routing.ranks_of(source, token):
                expected[source, peer] += 1
    assert counts.to_rank.tolist() == expected.tolist()
    inside = sum(
        int(counts.choices[a, b])
        for a in range(4)
        for b in range(4)
        if a != b and a // (4 // servers) == b // (4 // servers)
    )
    assert counts.choices_inside == inside
    assert counts.choices_across + inside + np.trace(counts.choices) == 15 * 3


def test_rows_worked_by_hand() -> None:
    """2 servers x 1 rank, experts 0, 1 | 2, 3: a token to both servers, one to the other twice."""
    counts = count_rows(
        [torch.tensor([[0, 2], [3, 2]]), torch.tensor([[2, 3]])], 2, Placement(4, 2)
    )
    assert counts.choices_across == 3
    assert counts.tokens_across == 2
    assert counts.choices_inside == 0
    assert counts.per_expert.tolist() == [1, 0, 3, 2]
    options = Options(servers=2, ranks_per_server=1, experts=4, top_k=2)
    topology = topology_of(shaped(), options)
    assert plan_for(counts, PER_CHOICE, "whole", topology, 100).completion_rows == 3
    assert plan_for(counts, PER_SERVER, "whole", topology, 100).completion_rows == 2


def test_rows_sent_must_be_those_counted() -> None:
    counts = count_rows([torch.tensor([[0]]), torch.tensor([[0]])], 2, Placement(2, 2))
    results = [
        replace(as_result(w), stats=SimpleNamespace(scale_out_rows=rows))
        for w, rows in zip(LayerCase(2, 2, 1, (1, 1)).wholes(), (0, 1), strict=True)
    ]
    check_rows_sent(counts, results)
    results[0].stats.scale_out_rows = 1
    with pytest.raises(DemoError, match="2 rows left their servers instead of 1"):
        check_rows_sent(counts, results)


def test_slowest_rank_from_a_common_start() -> None:
    rank_0 = [(1.0, 2.0), (5.0, 9.0), (0.0, 1.0)]
    rank_1 = [(1.5, 4.0), (5.0, 5.5), (0.5, 1.5)]
    assert slowest_s([rank_0, rank_1]) == 3


# -- options, text, training -----------------------------------------------------------------------


def test_bad_options_are_named() -> None:
    with pytest.raises(DemoError, match="hidden must be at least 1, not 0"):
        Options(hidden=0)
    with pytest.raises(DemoError, match="top_k must be at most 32 and the 3 experts, not 4"):
        Options(experts=3)
    with pytest.raises(DemoError, match="repeats"):
        Options(repeats=0)
    with pytest.raises(DemoError, match="dtype must be float32 or float64, not int8"):
        TrainOptions(dtype="int8")
    with pytest.raises(DemoError, match="steps must be at least 1"):
        TrainOptions(steps=0)
    assert Options(steps=0, tokens_per_rank=0).num_experts == 16


def test_text_and_passages(tmp_path: Path) -> None:
    text = read_text(None)
    assert len(text) > 1_000_000
    assert torch.equal(text, read_text(None))
    _, held_out = split(text)
    passages = slices(held_out, 3, 100)
    assert [len(contexts(p)) for p in passages] == [100, 100, 100]
    assert torch.equal(contexts(passages[1])[7], passages[1][7 : 7 + CONTEXT_BYTES])
    assert sum(len(contexts(p)) for p in slices(held_out[:50], 4, 100)) == 4 * 4  # a short text
    assert [len(contexts(p)) for p in slices(held_out[:50], 60, 100)] == [0] * 60
    (tmp_path / "short").write_text("too short")
    for path in (tmp_path / "short", tmp_path / "none"):
        with pytest.raises(DemoError):
            read_text(path)


def test_training_is_repeatable_and_learns() -> None:
    text = torch.arange(20_000).remainder(97).to(torch.uint8)
    steps: list[int] = []
    sizes = ModelSizes(1, 24, 24, 4, 2)
    pair = [train(text, sizes, 15, 3, lambda: steps.append(1)) for _ in range(2)]
    for name, value in pair[0].model.state_dict().items():
        assert torch.equal(value, pair[1].model.state_dict()[name])
    assert pair[0].bits_after < pair[0].bits_before - 1
    assert len(steps) == 30


def test_shaped_links_of_another_backend_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FASTKERN_BACKEND", "triton")
    monkeypatch.setattr("fastkern.demo.run.train", lambda *_: pytest.fail("trained"))
    with pytest.raises(DemoError, match=r"--shaped: .* FASTKERN_BACKEND is triton"):
        run_demo(Options(shaped=True), Console())
