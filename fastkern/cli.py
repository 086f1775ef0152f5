"""The command line: `fastkern demo`, `fastkern plan`.

What a command needs is imported inside it, so that help and errors come at once.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from .version import __version__

app = typer.Typer(
    help="All-to-all for mixture-of-experts layers, planned anew for every call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `fastkern` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fastkern {__version__}")
        raise typer.Exit


def _fail(command: str, text: object) -> typer.Exit:
    """Say why on one line, and give the exception that ends with code 1."""
    print(f"fastkern {command}: FAILED: {' '.join(str(text).split())}", file=sys.stderr)
    return typer.Exit(1)


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    servers: Annotated[int, typer.Option(min=1, help="Servers.")] = 2,
    ranks_per_server: Annotated[int, typer.Option(min=1, help="Ranks of each server.")] = 4,
    text: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time, on 3.10 too)
        typer.Option(help="Text to train on and to route; Python's own sources if not given."),
    ] = None,
    experts: Annotated[
        int, typer.Option(min=0, help="Experts, at least 2; 0: two for each rank.")
    ] = 0,
    tokens_per_rank: Annotated[int, typer.Option(min=0, help="Tokens of each rank.")] = 2048,
    hidden: Annotated[int, typer.Option(min=1, help="Floats in a row.")] = 256,
    steps: Annotated[int, typer.Option(min=0, help="Steps of training.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, after one more.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the training.")] = 0,
    shaped: Annotated[
        bool,
        typer.Option("--shaped", help="Also on rate-limited links, beside SpreadOut and direct."),
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=1, help="Most seconds for the ranks.")] = 300.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where a failure came from.")
    ] = False,
) -> None:
    """Run a real MoE layer over ranks as processes, check it bit by bit, and time it.

    Trains a tiny top-2 MoE language model on real text, with nothing that balances its experts.
    Each rank then takes tokens of its own through the layer, exchanging rows with fastkern.
    """
    from rich.console import Console

    from .demo.options import DemoError, Options
    from .demo.run import run_demo

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up on the way out
    try:
        options = Options(
            servers=servers,
            ranks_per_server=ranks_per_server,
            text=text,
            experts=experts,
            tokens_per_rank=tokens_per_rank,
            hidden=hidden,
            steps=steps,
            repeats=repeats,
            seed=seed,
            shaped=shaped,
            timeout_s=timeout_s,
        )
        run_demo(options, Console())
    except DemoError as error:
        if traceback and error.details:
            print(error.details, file=sys.stderr)
        raise _fail("demo", error) from None


@app.command("plan")
def plan_file(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Rows from each rank to each: JSON or CSV; -: input."),
    ],
    servers: Annotated[int, typer.Option(min=1, help="Servers.")] = 1,
    ranks_per_server: Annotated[
        int, typer.Option(min=0, help="Ranks of each server; 0: as the matrix says.")
    ] = 0,
    row_bytes: Annotated[int, typer.Option(min=1, max=1 << 31, help="Bytes of a row.")] = 14336,
    policy: Annotated[str, typer.Option(help="auto, whole, split, direct or spreadout.")] = "auto",
    scale_up: Annotated[float, typer.Option(help="GB/s per rank inside a server.")] = 450.0,
    scale_out: Annotated[float, typer.Option(help="GB/s per rank between servers.")] = 50.0,
) -> None:
    """Plan one exchange from its traffic matrix, and describe the plan."""
    from .planner import Topology, plan

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        traffic = _matrix(text)
        topology = Topology(
            servers, ranks_per_server or max(1, len(traffic) // servers), scale_up, scale_out
        )
        made = plan(traffic, topology, row_bytes, policy)  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise _fail("plan", error) from None
    print(made.describe())


def _matrix(text: str) -> list[list[int]]:
    """Rows of numbers from a JSON array of arrays, or from lines of numbers and commas."""
    import json

    if text.lstrip()[:1] in ("[", "{"):
        rows = json.loads(text)
    else:
        rows = [[int(cell) for cell in line.split(",")] for line in text.splitlines() if line]
    if not isinstance(rows, list) or any(
        not isinstance(row, list) or len(row) != len(rows) for row in rows
    ):
        raise ValueError("not a square matrix: as many numbers in each row as there are rows")
    return rows
