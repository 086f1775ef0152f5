"""The demo's processes: ranks that fail, and exchanges that go wrong between them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastkern
from fastkern.demo.check import check_results
from fastkern.demo.console import one_thread
from fastkern.demo.errors import DemoError
from fastkern.demo.launch import run_ranks
from fastkern.demo.layer import run_whole
from fastkern.demo.model import ByteModel
from fastkern.demo.options import Options
from fastkern.demo.results import RankResult
from fastkern.demo.text import contexts, read_text, slices
from fastkern.demo.worker import run_rank, save_inputs
from fastkern.moe.placement import Placement

OPTIONS = Options(servers=2, ranks_per_server=1, tokens_per_rank=64, hidden=24, repeats=1, top_k=3)


def _rank_that_fails(rank: int, step: Callable[[], None], how: str) -> None:
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no\nluck")
    time.sleep(60)


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


def _rank_with_a_flipped_bit(
    rank: int, step: Callable[[], None], folder: Path, options: Options, call: str
) -> RankResult:
    """A rank of the demo; on rank 1 the lowest bit of a call's first float is wrong."""
    right = getattr(fastkern.Communicator, call) if call else None

    def wrong(self: fastkern.Communicator, *args: Any, **kwargs: Any) -> Any:
        assert right is not None
        made = right(self, *args, **kwargs)
        rows: Tensor = made[0] if isinstance(made, tuple) else made
        if rank == 1:
            rows.view(torch.int32)[0, 0] ^= 1
        return made

    if call:
        setattr(fastkern.Communicator, call, wrong)
    return run_rank(rank, step, folder, options)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("", ""),
        ("dispatch", r"rank 1, dispatch by fastkern and by gloo: 1 of \d+ rows"),
        ("combine", r"rank 1, the layer's output: 1 of 64 rows differ, first row 0"),
    ],
)
def test_a_wrong_bit_between_processes_is_found(tmp_path: Path, call: str, text: str) -> None:
    torch.manual_seed(0)
    model, passages = ByteModel(OPTIONS.sizes), slices(read_text(None), 2, 64)
    save_inputs(tmp_path, model, passages)
    with one_thread(), torch.no_grad():
        xs = [model.first_rows(contexts(passage)) for passage in passages]
        wholes = run_whole(model.moe_layers()[0], xs, 2, Placement(4, 2))

    def run_and_check() -> None:
        args = (tmp_path, OPTIONS, call)
        check_results(wholes, run_ranks(2, _rank_with_a_flipped_bit, args, timeout_s=60))

    if not text:
        run_and_check()
        return
    with pytest.raises(DemoError, match=text):
        run_and_check()
