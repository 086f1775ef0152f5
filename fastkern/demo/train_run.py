"""The training demo from text to verdict: the same model over ranks and in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console

from fastkern.nn import OneProcess

from .compare import Comparison, verdict
from .console import one_thread, progress_bar, say_ok
from .errors import DemoError
from .launch import run_ranks
from .options import TrainOptions
from .text import read_text, split
from .train_report import print_courses
from .train_worker import RankCourse, train_rank
from .training import Course, positions, train


def run_train_demo(options: TrainOptions, console: Console) -> None:
    """Train over ranks, train in one process, compare, report. Raises DemoError at a difference."""
    if options.record is not None and not options.record.parent.is_dir():
        raise DemoError(f"cannot record the routing: {options.record.parent} is no folder")
    with one_thread():
        ranks, whole = _train_both(options, console)
    comparison = Comparison.of([r.losses for r in ranks], [r.routing for r in ranks], whole)
    step_ms = median(max(r.step_s[k] for r in ranks) for k in range(options.steps)) * 1e3
    print_courses(console, options, comparison, step_ms)
    if options.record is not None:
        save_routing(options.record, options, comparison.routing)
    found = verdict(comparison, options.dtype)
    steps = f"{options.steps} steps over {options.num_ranks} ranks and in one process"
    say_ok(console, f"{steps}: {found}.")


def _train_both(options: TrainOptions, console: Console) -> tuple[list[RankCourse], Course]:
    text, _ = split(read_text(options.text))
    with progress_bar(console) as progress:
        task = progress.add_task("training over ranks", total=options.steps)
        with tempfile.TemporaryDirectory(prefix="fastkern-demo-") as folder:
            torch.save(text.clone(), Path(folder) / "text")
            ranks = run_ranks(
                options.num_ranks,
                train_rank,
                (Path(folder), options),
                timeout_s=options.timeout_s,
                on_step=lambda: progress.advance(task),
            )
        task = progress.add_task("training in one process", total=options.steps)
        whole = train_whole(options, text, lambda: progress.advance(task))
    return ranks, whole


def train_whole(options: TrainOptions, text: torch.Tensor, on_step: Callable[[], object]) -> Course:
    """Train the model whole, each step on the tokens of all ranks, which stand in rank order."""
    places = positions(options, len(text)).flatten(1)
    order = OneProcess(options.servers, options.ranks_per_server)
    return train(options, text, places, order, lambda model: None, on_step)


def save_routing(path: Path, options: TrainOptions, routing: torch.Tensor) -> None:
    """Write topk_idx int32 [steps, layers, ranks, tokens, top_k], num_experts, source to .npz."""
    try:
        with path.open("wb") as file:  # given a name, NumPy would put .npz behind it
            np.savez_compressed(
                file,
                topk_idx=routing.numpy(),
                num_experts=options.num_experts,
                source=options.source,
            )
    except OSError as error:
        raise DemoError(f"cannot record the routing: {error}") from error
