"""The training demo: its verdict, its record, and faults that it must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fastkern.demo import train_run, training
from fastkern.demo.compare import TOLERANCE, TOLERANCE_AFTER_A_TIE, Comparison, verdict
from fastkern.demo.errors import DemoError
from fastkern.demo.launch import run_ranks
from fastkern.demo.model import ByteModel
from fastkern.demo.options import TrainOptions
from fastkern.demo.text import CONTEXT_BYTES, read_text, split
from fastkern.demo.train_run import run_train_demo, train_whole
from fastkern.demo.train_worker import RankCourse, train_rank
from fastkern.nn import ExpertParallelMoE
from tests.demo_cases import command, words_missing

SMALL = TrainOptions(
    ranks_per_server=1, layers=2, hidden=16, tokens_per_rank=24, steps=4, experts=5, top_k=3
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- in one process --------------------------------------------------------------------------------


def test_whole_training_is_repeatable_and_learns() -> None:
    text, _ = split(read_text(None))
    options = replace(SMALL, steps=12, tokens_per_rank=100)
    steps: list[int] = []
    pair = [train_whole(options, text, lambda: steps.append(1)) for _ in range(2)]
    assert torch.equal(pair[0].losses, pair[1].losses)
    assert torch.equal(pair[0].routing, pair[1].routing)
    assert float(pair[0].losses[-1]) < float(pair[0].losses[0]) - 0.3
    assert pair[0].routing.shape == (12, 2, 200, 3)
    assert pair[0].routing.dtype == torch.int32
    assert len(steps) == 24
    other = train_whole(replace(options, seed=1), text, lambda: None)
    assert not torch.equal(other.losses, pair[0].losses)


def test_ranks_see_tokens_of_their_own() -> None:
    places = training.positions(SMALL, 1000)
    assert places.shape == (4, 2, 24)
    assert int(places.min()) >= CONTEXT_BYTES
    assert int(places.max()) < 1000
    assert not torch.equal(places[:, 0], places[:, 1])
    assert not torch.equal(places[0], places[1])


# -- the verdict -----------------------------------------------------------------------------------


def comparison(apart: list[float], unlike: list[int]) -> Comparison:
    """Losses of 2 that differ by so much, and numbers of unlike choices, in each step."""
    whole = torch.full((len(apart),), 2.0, dtype=torch.float64)
    losses = whole + torch.tensor(apart, dtype=torch.float64)
    routing = torch.zeros(len(apart), 1, 2, 3, 1, dtype=torch.int32)
    return Comparison(losses, whole, routing, torch.tensor(unlike)[:, None])


def test_equal_losses_are_passed() -> None:
    assert TOLERANCE["float64"] < TOLERANCE["float32"] < TOLERANCE_AFTER_A_TIE
    assert "at most 1.0e-12 nats (tolerance 1e-09)" in verdict(
        comparison([0, 1e-12, 0], [0, 0, 0]), "float64"
    )
    found = verdict(comparison([1e-7, 3e-2], [0, 1]), "float32")
    assert "1.0e-07 while the choices are alike (tolerance 1e-04)" in found
    assert "3.0e-02 later (tolerance 1e-01)" in found
    assert "later" in verdict(comparison([3e-2], [1]), "float32")


@pytest.mark.parametrize(
    ("dtype", "apart", "unlike", "step"),
    [
        ("float64", [0, 0, -2e-9], [0, 0, 0], 2),
        ("float64", [0, 2e-9, 0], [5, 5, 5], 1),  # no tie excuses float64
        ("float64", [float("nan"), 0], [0, 0], 0),
        ("float32", [0, 2e-4], [0, 0], 1),
        ("float32", [2e-4, 2e-4], [0, 1], 0),  # before the tie
        ("float32", [0, 1e-3, 0.2], [0, 1, 9], 2),
    ],
)
def test_unequal_losses_are_refused(
    dtype: str, apart: list[float], unlike: list[int], step: int
) -> None:
    with pytest.raises(DemoError, match=f"nats at step {step}, more than"):
        verdict(comparison(apart, unlike), dtype)


def test_unlike_choices_are_counted() -> None:
    text, _ = split(read_text(None))
    whole = train_whole(SMALL, text, lambda: None)
    routing = list(whole.routing.view(4, 2, 2, 24, 3).unbind(2))
    losses = [whole.losses - 1, whole.losses + 1]
    same = Comparison.of(losses, routing, whole)
    assert torch.equal(same.losses, same.whole_losses)
    assert same.num_alike == 4
    routing[1] = routing[1].clone()
    routing[1][2, 1, 7, 0] += 1
    other = Comparison.of(losses, routing, whole)
    assert other.num_alike == 2
    assert other.unlike.tolist() == [[0, 0], [0, 0], [0, 1], [0, 0]]


# -- over ranks ------------------------------------------------------------------------------------


def _train_wrongly(
    rank: int, step: Callable[[], None], folder: Path, options: TrainOptions, fault: str
) -> RankCourse:
    """A rank of the training with something amiss."""
    from fastkern.demo import train_worker

    if fault == "gate not summed":
        train_worker.sum_replicated = lambda model: None  # type: ignore[assignment]
    if fault == "expert gradients of one rank":
        right = train_worker.sum_replicated

        def halve(model: ByteModel) -> None:
            right(model)
            for layer in model.moe_layers():
                for p in layer.experts.parameters():
                    assert p.grad is not None
                    p.grad /= options.num_ranks

        train_worker.sum_replicated = halve  # type: ignore[assignment]
    if fault == "a row":
        whole_run = ExpertParallelMoE.run_experts

        def run_experts(
            self: ExpertParallelMoE, rows: torch.Tensor, counts: list[int]
        ) -> torch.Tensor:
            made = whole_run(self, rows, counts)
            return torch.cat([made[:1] * (1 + 1e-3), made[1:]]) if rank == 1 else made

        ExpertParallelMoE.run_experts = run_experts  # type: ignore[assignment,method-assign]
    return train_rank(rank, step, folder, options)


@pytest.mark.parametrize("fault", ["", "gate not summed", "expert gradients of one rank", "a row"])
def test_a_fault_on_the_ranks_is_found(tmp_path: Path, fault: str) -> None:
    # Adam hardly sees the scale of a gradient; the tolerance of float64 does.
    text, _ = split(read_text(None))
    torch.save(text.clone(), tmp_path / "text")
    ranks = run_ranks(2, _train_wrongly, (tmp_path, SMALL, fault), timeout_s=100)
    whole = train_whole(SMALL, text, lambda: None)
    found = Comparison.of([r.losses for r in ranks], [r.routing for r in ranks], whole)
    if fault:
        with pytest.raises(DemoError, match="nats at step"):
            verdict(found, "float64")
    else:
        assert found.num_alike == 4
        verdict(found, "float64")


def test_train_demo_end_to_end(tmp_path: Path) -> None:
    record = tmp_path / "routing"  # the name is kept as it is
    ended = command(
        "train-demo", "--ranks-per-server", "2", "--layers", "2", "--steps", "6",
        "--tokens-per-rank", "40", "--experts", "6", "--top-k", "3", "--record", str(record),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    words = (
        "2 servers x 2 ranks as processes; 2 MoE layers of 6 experts, top-3, float64",
        "one process",
        "difference",
        "OK: 6 steps over 4 ranks and in one process: losses differ by at most",
        "(tolerance 1e-09)",
    )
    assert words_missing(ended.stdout, words) == []
    with np.load(record) as stored:
        topk_idx, num_experts, source = (stored[k] for k in ("topk_idx", "num_experts", "source"))
    assert topk_idx.shape == (6, 2, 4, 40, 3)
    assert topk_idx.dtype == np.int32
    assert int(num_experts) == 6
    assert str(source) == "Python's standard library"
    assert topk_idx.min() == 0
    assert topk_idx.max() == 5
    assert all(len(set(chosen)) == 3 for chosen in topk_idx.reshape(-1, 3).tolist())


def test_train_demo_in_float32() -> None:
    args = ("--ranks-per-server", "1", "--layers", "1", "--steps", "3", "--dtype", "float32")
    ended = command("train-demo", *args)
    assert ended.returncode == 0, ended.stderr
    assert words_missing(ended.stdout, ["float32, rows of 256 bytes", "(tolerance 1e-04)"]) == []


def test_a_difference_ends_with_one_line_and_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole course, with ranks whose losses are off by a little."""
    text, _ = split(read_text(None))
    whole = train_whole(SMALL, text, lambda: None)
    routing = whole.routing.view(4, 2, 2, 24, 3)
    courses = [RankCourse(whole.losses + 1e-6, routing[:, :, r], [0.1] * 4) for r in range(2)]
    monkeypatch.setattr(train_run, "run_ranks", lambda *args, **kwargs: courses)
    shown = Console(record=True, width=120)
    with pytest.raises(DemoError, match=r"differ by 1\.0e-06 nats at step 0, more than 1e-09"):
        run_train_demo(SMALL, shown)
    assert "+1.0e-06" in shown.export_text()  # the curves are shown all the same


def test_nowhere_to_record_is_said_at_once(tmp_path: Path) -> None:
    options = replace(SMALL, record=tmp_path / "none" / "routing.npz")
    with pytest.raises(DemoError, match=r"cannot record the routing: .*none is no folder"):
        run_train_demo(options, Console())
    with pytest.raises(DemoError, match="cannot record the routing: "):
        train_run.save_routing(tmp_path, SMALL, torch.zeros(1, dtype=torch.int32))
