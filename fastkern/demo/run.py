"""The demo from text to verdict."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .check import check_results
from .gate import train
from .launch import run_ranks
from .layer import Placement, run_whole
from .options import Options
from .report import print_report
from .text import contexts, read_text, slices, split
from .worker import num_steps, run_rank, save_inputs


def run_demo(options: Options, console: Console) -> None:
    """Train, run the layer over ranks, check, report. Raises DemoError at any difference or loss.

    Everything here and on the ranks runs on one thread: what the checks compare then has equal
    bits, and training gives the same model however many cores there are.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run(options, console)
    finally:
        torch.set_num_threads(threads)


def _run(options: Options, console: Console) -> None:
    text = read_text(options.text)
    to_train, held_out = split(text)
    passages = slices(held_out, options.num_ranks, options.tokens_per_rank)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("training the layer", total=options.steps)
        trained = train(
            to_train,
            options.hidden,
            options.num_experts,
            options.steps,
            options.seed,
            lambda: progress.advance(task),
        )
        task = progress.add_task("running it over ranks", total=num_steps(options))
        with tempfile.TemporaryDirectory(prefix="fastkern-demo-") as folder:
            save_inputs(Path(folder), trained.model, passages)
            results = run_ranks(
                options.num_ranks,
                run_rank,
                (Path(folder), options),
                timeout_s=options.timeout_s,
                on_step=lambda: progress.advance(task),
            )
        progress.add_task("checking", total=None)
        with torch.no_grad():
            xs = [trained.model.rows(contexts(passage)) for passage in passages]
            wholes = run_whole(trained.model.moe, xs)
        check_results(xs, wholes, Placement(options.num_experts, options.num_ranks), results)
    print_report(console, options, trained, len(text), results)
    console.print()
    console.print(
        f"[bold green]OK[/]: all {options.num_ranks} ranks agree with the layer in one process, "
        "bit by bit: choices, dispatched rows, returned rows, outputs.",
        highlight=False,
        soft_wrap=True,
    )
