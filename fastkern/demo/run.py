"""The demo from text to verdict."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console

from fastkern.config import read_settings
from fastkern.moe.placement import Placement

from .check import check_results, check_rows_sent
from .console import one_thread, progress_bar, say_ok
from .errors import DemoError
from .launch import run_ranks
from .layer import run_whole
from .options import Options
from .pretrain import train
from .report import print_report
from .rows import count_rows
from .text import contexts, read_text, slices, split
from .worker import num_steps, run_rank, save_inputs


def run_demo(options: Options, console: Console) -> None:
    """Train, run the layer over ranks, check, report. Raises DemoError at any difference or loss.

    Everything here and on the ranks runs on one thread: what the checks compare then has equal
    bits, and training gives the same model however many cores there are.
    """
    try:
        backend = read_settings().backend
    except ValueError as error:
        raise DemoError(str(error)) from error
    if options.shaped and backend not in (None, "host"):
        raise DemoError(
            f"--shaped: only the kernels on the host have links of a set rate, and "
            f"FASTKERN_BACKEND is {backend}"
        )
    with one_thread():
        _run(options, console)


def _run(options: Options, console: Console) -> None:
    text = read_text(options.text)
    to_train, held_out = split(text)
    passages = slices(held_out, options.num_ranks, options.tokens_per_rank)
    placement = Placement(options.num_experts, options.num_ranks)
    with progress_bar(console) as progress:
        task = progress.add_task("training the layer", total=options.steps)
        trained = train(
            to_train, options.sizes, options.steps, options.seed, lambda: progress.advance(task)
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
            xs = [trained.model.first_rows(contexts(passage)) for passage in passages]
            wholes = run_whole(trained.model.moe_layers()[0], xs, options.servers, placement)
        check_results(wholes, results)
    counts = count_rows([w.topk_idx for w in wholes], options.servers, placement)
    check_rows_sent(counts, results)
    print_report(console, options, trained, len(text), counts, results)
    say_ok(
        console,
        f"all {options.num_ranks} ranks agree with the layer in one process, bit by bit: choices, "
        "dispatched rows and weights, outputs.",
    )
