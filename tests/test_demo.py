"""The demo: its layer against itself, its checks against wrong rows, its processes, its commands.

In-process ranks are threads that exchange rows through a list; the end-to-end runs are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastkern
from fastkern.cli import app
from fastkern.demo.check import check_results, same_rows
from fastkern.demo.gate import train
from fastkern.demo.launch import run_ranks
from fastkern.demo.layer import TOP_K, MoeLayer, Placement, Spread, Whole, run_spread, run_whole
from fastkern.demo.options import DemoError, Options
from fastkern.demo.results import RankResult, slowest_s
from fastkern.demo.text import CONTEXT_BYTES, contexts, read_text, slices, split
from fastkern.demo.worker import run_rank, save_inputs

HIDDEN = 24
TINY = ("--ranks-per-server", "2", "--steps", "3", "--repeats", "1", "--tokens-per-rank", "100")
# (source rank, destination rank, rows) -> rows as they arrive
Wire = Callable[[int, int, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread_no_grad() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def honest(src_rank: int, dst_rank: int, rows: torch.Tensor) -> torch.Tensor:
    return rows


def run_in_threads(
    layer: MoeLayer, placement: Placement, xs: Sequence[torch.Tensor], wire: Wire = honest
) -> list[Spread]:
    """Every rank's forward, a thread each; float rows travel through `wire`."""
    num_ranks = placement.num_ranks
    barrier = threading.Barrier(num_ranks)
    sent: list[Sequence[torch.Tensor]] = [()] * num_ranks
    found: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        def exchange(rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
            sent[rank] = torch.split(rows, send)
            barrier.wait(20)
            parts = [sent[src][rank] for src in range(num_ranks)]
            barrier.wait(20)
            assert [len(part) for part in parts] == receive
            if rows.is_floating_point():
                parts = [wire(src, rank, part) for src, part in enumerate(parts)]
            return torch.cat(parts)

        experts = [layer.experts[e] for e in placement.experts_of(rank)]
        with torch.no_grad():  # a thread has a mode of its own
            try:
                found[rank] = run_spread(layer.gate, experts, placement, xs[rank], exchange)
            except BaseException:
                barrier.abort()
                raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in found
    return found


def as_results(spreads: Sequence[Spread]) -> list[RankResult]:
    return [RankResult(s.choice, s.send, s.received, s.returned, s.output, {}, {}) for s in spreads]


def make_case(
    num_experts: int, num_tokens: Sequence[int]
) -> tuple[MoeLayer, Placement, list[torch.Tensor], list[Whole]]:
    torch.manual_seed(len(num_tokens) * 100 + num_experts)
    layer = MoeLayer(HIDDEN, num_experts)
    layer.gate.weight += 0.3 * torch.randn(num_experts, 1)  # skewed
    xs = [torch.randn(n, HIDDEN) + 0.5 for n in num_tokens]
    return layer, Placement(num_experts, len(num_tokens)), xs, run_whole(layer, xs)


@pytest.mark.parametrize(
    ("num_experts", "num_tokens"),
    [
        (8, (50, 50, 50, 50)),
        (7, (40, 0, 33)),  # unequal ownership, a rank without tokens
        (2, (9, 30, 1, 17, 5)),  # ranks without experts
        (3, (60,)),
        (4, (0, 0)),
        (40, (3, 2)),  # experts without rows
    ],
)
def test_spread_equals_whole(num_experts: int, num_tokens: tuple[int, ...]) -> None:
    layer, placement, xs, wholes = make_case(num_experts, num_tokens)
    spreads = run_in_threads(layer, placement, xs)
    check_results(xs, wholes, placement, as_results(spreads))
    for x, spread, n in zip(xs, spreads, num_tokens, strict=True):
        assert spread.output.shape == (n, HIDDEN)
        assert sum(spread.send) == n * TOP_K
        # The layer once more, by its definition, token by token.
        for t in range(0, n, 7):
            best = layer.gate(x[t]).topk(TOP_K)
            expected = sum(
                w * layer.experts[int(e)](x[t])
                for w, e in zip(best.values.softmax(0), best.indices, strict=True)
            )
            torch.testing.assert_close(spread.output[t], expected, rtol=1e-4, atol=1e-5)


def test_a_wrong_row_on_the_wire_is_found() -> None:
    layer, placement, xs, wholes = make_case(8, (50, 50, 50, 50))
    busy = placement.rank_of(int(wholes[2].choice.experts.flatten().mode().values))

    def check(src_rank: int, dst_rank: int, wrong_call: int) -> None:
        """Run with one bit flipped in a call's rows between two ranks."""
        calls = [0]

        def wire(src: int, dst: int, rows: torch.Tensor) -> torch.Tensor:
            if (src, dst) == (src_rank, dst_rank):
                calls[0] += 1
                if calls[0] == wrong_call:
                    rows = rows.clone()
                    rows.view(torch.int32)[-1, 3] ^= 1  # the lowest bit of one float
            return rows

        check_results(xs, wholes, placement, as_results(run_in_threads(layer, placement, xs, wire)))
        assert calls == [2]  # dispatch and combine

    check(2, busy, wrong_call=3)  # there is none
    text = rf"rank {busy}, rows received for its experts: 1 of \d+ rows"
    with pytest.raises(DemoError, match=text):
        check(2, busy, wrong_call=1)
    with pytest.raises(DemoError, match=r"rank 2, rows received from experts: 1 of 100 rows"):
        check(busy, 2, wrong_call=2)


@pytest.mark.parametrize("what", ["experts", "weights", "received", "returned", "output", "swap"])
def test_a_wrong_result_is_found(what: str) -> None:
    layer, placement, xs, wholes = make_case(6, (30, 31, 32))
    results = as_results(run_in_threads(layer, placement, xs))
    check_results(xs, wholes, placement, results)
    last = results[2]
    if what in ("experts", "weights"):
        getattr(last.choice, what)[0] = getattr(last.choice, what)[0].flip(0)
    elif what == "swap":
        results[2] = replace(last, returned=last.returned.flip(0))
    else:
        getattr(last, what)[5] += 1e-3
    with pytest.raises(DemoError, match="rank 2"):
        check_results(xs, wholes, placement, results)


def test_same_rows_compares_bytes() -> None:
    odd = torch.tensor([[0.0, float("nan")]])
    same_rows("it", odd, odd.clone())
    same_rows("it", torch.empty(0, 4), torch.empty(0, 4))
    for other in (torch.tensor([[-0.0, float("nan")]]), odd.double(), odd.view(2, 1)):
        with pytest.raises(DemoError, match="it: "):
            same_rows("it", other, odd)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(16, 8), (2, 5), (7, 3), (3, 3), (5, 1)])
def test_placement(num_experts: int, num_ranks: int) -> None:
    placement = Placement(num_experts, num_ranks)
    owned = [list(placement.experts_of(rank)) for rank in range(num_ranks)]
    assert [e for own in owned for e in own] == list(range(num_experts))
    assert all(placement.rank_of(e) == rank for rank, own in enumerate(owned) for e in own)
    assert placement.experts_per_rank() == [len(own) for own in owned]


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
    with torch.enable_grad():
        pair = [train(text, HIDDEN, 4, 15, 3, lambda: steps.append(1)) for _ in range(2)]
    for name, value in pair[0].model.state_dict().items():
        assert torch.equal(value, pair[1].model.state_dict()[name])
    assert pair[0].bits_after < pair[0].bits_before - 1
    assert len(steps) == 30


def test_slowest_rank_from_a_common_start() -> None:
    rank_0 = [(1.0, 2.0), (5.0, 9.0), (0.0, 1.0)]
    rank_1 = [(1.5, 4.0), (5.0, 5.5), (0.5, 1.5)]
    assert slowest_s([rank_0, rank_1]) == 3


# -- processes -------------------------------------------------------------------------------------


def _rank_that_fails(rank: int, step: Callable[[], None], how: str) -> None:
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no\nluck")
    time.sleep(60)


def _rank_on_a_bad_wire(
    rank: int, step: Callable[[], None], folder: Path, options: Options
) -> RankResult:
    """A rank whose exchange flips a bit on its way to rank 1."""
    right = fastkern.all_to_all_single

    def wrong(output: torch.Tensor, *args: Any) -> None:
        right(output, *args)
        if rank == 1 and output.is_floating_point():
            output.view(torch.int32)[0, 0] ^= 1

    fastkern.all_to_all_single = wrong  # type: ignore[assignment]
    return run_rank(rank, step, folder, options)


@pytest.mark.parametrize(
    ("how", "text"),
    [("killed", "rank 1 was ended by signal 9"), ("raises", "rank 1: RuntimeError")],
)
def test_a_failed_rank_ends_all(how: str, text: str) -> None:
    before = set(active_children())  # the pools of other tests may stand
    begin = time.monotonic()
    with pytest.raises(DemoError, match=text):
        run_ranks(2, _rank_that_fails, (how,), timeout_s=60)
    assert time.monotonic() - begin < 40
    assert set(active_children()) <= before


def test_ranks_out_of_time() -> None:
    before = set(active_children())
    with pytest.raises(DemoError, match=r"rank 0, 1 not done after 0\.1 s"):
        run_ranks(2, _rank_that_fails, ("",), timeout_s=0.1)
    assert set(active_children()) <= before


def test_a_bad_exchange_between_processes_is_found(tmp_path: Path) -> None:
    options = Options(servers=2, ranks_per_server=1, tokens_per_rank=64, hidden=HIDDEN, repeats=1)
    text = read_text(None)
    with torch.enable_grad():
        trained = train(text, HIDDEN, options.num_experts, 0, 0, lambda: None)
    save_inputs(tmp_path, trained.model, slices(text, 2, 64))
    with pytest.raises(DemoError, match=r"rank 1, dispatch by fastkern and by gloo: 1 of \d+ rows"):
        run_ranks(2, _rank_on_a_bad_wire, (tmp_path, options), timeout_s=60)


# -- commands --------------------------------------------------------------------------------------


def command(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    script = Path(sysconfig.get_path("scripts")) / "fastkern"
    return subprocess.run(
        [script, *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )


def test_demo_end_to_end() -> None:
    ended = command("demo", *TINY, "--shaped", "--experts", "7")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    for word in (
        "2 servers x 2 ranks",
        "max / mean",
        "bound",
        "count exchange",
        "unpermute",
        "gloo",
        "spreadout",
        "ms / bound",
        "OK: all 4 ranks agree",
    ):
        assert word in ended.stdout


def test_demo_fails_on_one_line() -> None:
    ended = command("demo", *TINY, "--ranks-per-server", "1", FASTKERN_CHUNK_BYTES="many")
    assert ended.returncode == 1
    assert ended.stderr.startswith("fastkern demo: FAILED: rank ")
    assert "FASTKERN_CHUNK_BYTES='many' is not a number" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.split() == [
        "fastkern",
        fastkern.__version__,
    ]


def test_plan_describes_a_matrix(tmp_path: Path) -> None:
    matrix = [[0, 3, 5, 1], [1, 0, 9, 2], [4, 4, 0, 0], [7, 0, 1, 0]]
    (tmp_path / "rows.csv").write_text("\n".join(",".join(map(str, row)) for row in matrix))
    options = ["--servers", "2", "--row-bytes", "1000000", "--policy", "whole"]
    by_csv = CliRunner().invoke(app, ["plan", str(tmp_path / "rows.csv"), *options])
    by_json = CliRunner().invoke(app, ["plan", "-", *options], input=json.dumps(matrix))
    assert by_csv.exit_code == by_json.exit_code == 0
    assert by_csv.output == by_json.output
    assert "2 servers x 2 ranks, rows of 1000000 bytes" in by_csv.output
    assert "bound 9 (100.0% of the bound)" in by_csv.output


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        ("[[1, 2], [3, -4]]", "traffic[1][1] is -4"),
        ("1,2\n3,x", "'x'"),
        ("1,2\n3", "not a square matrix"),
        ('{"rows": 1}', "not a square matrix"),
        ("[[1, 2", "Expecting"),
        ("", "must have shape [1, 1]"),
    ],
)
def test_plan_refuses_on_one_line(matrix: str, text: str) -> None:
    ended = CliRunner().invoke(app, ["plan", "-"], input=matrix)
    assert ended.exit_code == 1
    assert ended.output.startswith("fastkern plan: FAILED: ")
    assert text in ended.output
    assert ended.output.count("\n") == 1
