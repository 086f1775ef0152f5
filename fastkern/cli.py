"""The command line: `fastkern demo`, `fastkern train-demo`, `fastkern plan`, `fastkern tune`.

What a command needs is imported inside it, so that help and errors come at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .version import __version__

if TYPE_CHECKING:
    from rich.console import Console

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


_Servers = Annotated[int, typer.Option(min=1, help="Servers.")]
_RanksPerServer = Annotated[int, typer.Option(min=1, help="Ranks of each server.")]
_Text = Annotated[
    Optional[Path],  # noqa: UP045 (typer reads it at run time, on 3.10 too)
    typer.Option(help="Text to train on and to route; Python's own sources if not given."),
]
_Experts = Annotated[int, typer.Option(min=0, help="Experts of a layer; 0: two for each rank.")]
_TopK = Annotated[int, typer.Option(min=1, max=32, help="Experts of a token.")]
_Hidden = Annotated[int, typer.Option(min=1, help="Floats in a row.")]
_Seed = Annotated[int, typer.Option(help="Seed of the training.")]
_TimeoutS = Annotated[float, typer.Option(min=1, help="Most seconds for the ranks.")]
_Traceback = Annotated[bool, typer.Option("--traceback", help="Show where a failure came from.")]


@app.command()
def demo(
    servers: _Servers = 2,
    ranks_per_server: _RanksPerServer = 4,
    text: _Text = None,
    experts: _Experts = 0,
    top_k: _TopK = 4,
    tokens_per_rank: Annotated[int, typer.Option(min=0, help="Tokens of each rank.")] = 2048,
    hidden: _Hidden = 256,
    steps: Annotated[int, typer.Option(min=0, help="Steps of training.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, after one more.")] = 5,
    seed: _Seed = 0,
    shaped: Annotated[
        bool,
        typer.Option("--shaped", help="Also on rate-limited links, beside SpreadOut and direct."),
    ] = False,
    timeout_s: _TimeoutS = 300.0,
    traceback: _Traceback = False,
) -> None:
    """Run a real MoE layer over ranks as processes, check it bit by bit, and time it.

    Trains a tiny MoE language model on real text, with nothing that balances its experts. Each rank
    then takes tokens of its own through the layer, which dispatches and combines with fastkern.
    """
    from .demo.options import Options
    from .demo.run import run_demo

    _run_demo(
        "demo",
        traceback,
        lambda console: run_demo(
            Options(
                servers=servers,
                ranks_per_server=ranks_per_server,
                text=text,
                experts=experts,
                top_k=top_k,
                tokens_per_rank=tokens_per_rank,
                hidden=hidden,
                steps=steps,
                repeats=repeats,
                seed=seed,
                shaped=shaped,
                timeout_s=timeout_s,
            ),
            console,
        ),
    )


@app.command("train-demo")
def train_demo(
    servers: _Servers = 2,
    ranks_per_server: _RanksPerServer = 4,
    text: _Text = None,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers.")] = 3,
    experts: _Experts = 0,
    top_k: _TopK = 2,
    tokens_per_rank: Annotated[
        int, typer.Option(min=1, help="Tokens of each rank in a step.")
    ] = 128,
    hidden: _Hidden = 64,
    dtype: Annotated[
        str, typer.Option(help="float64 or float32; in float32 near ties part the runs.")
    ] = "float64",
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 60,
    seed: _Seed = 0,
    record: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the experts chosen in every step to this file (.npz)."),
    ] = None,
    timeout_s: _TimeoutS = 300.0,
    traceback: _Traceback = False,
) -> None:
    """Train a MoE language model with its experts spread over ranks, and whole in one process.

    Both trainings begin with the same weights and see the same tokens of real text; each rank holds
    its experts and a part of the tokens. Their losses must be the same up to rounding.
    """
    from .demo.options import TrainOptions
    from .demo.train_run import run_train_demo

    _run_demo(
        "train-demo",
        traceback,
        lambda console: run_train_demo(
            TrainOptions(
                servers=servers,
                ranks_per_server=ranks_per_server,
                text=text,
                layers=layers,
                experts=experts,
                top_k=top_k,
                tokens_per_rank=tokens_per_rank,
                hidden=hidden,
                dtype=dtype,
                steps=steps,
                seed=seed,
                record=record,
                timeout_s=timeout_s,
            ),
            console,
        ),
    )


def _run_demo(command: str, traceback: bool, run: Callable[[Console], None]) -> None:
    """Run a demo; it leaves no processes behind, and fails on one line."""
    from rich.console import Console

    from .demo.errors import DemoError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up on the way out
    try:
        run(Console())
    except DemoError as error:
        if traceback and error.details:
            print(error.details, file=sys.stderr)
        raise _fail(command, error) from None


@app.command()
def tune(
    driver: Annotated[
        str,
        typer.Option(help="auto: the GPU that PyTorch sees; cuda, hip; host: the CPU, for a try."),
    ] = "auto",
    backend: Annotated[
        str,
        typer.Option(
            help="Kernels to measure: those in C++ (auto), or triton; blocks, lanes, tiles."
        ),
    ] = "auto",
    device: Annotated[int, typer.Option(min=0, help="Number of the device.")] = 0,
    servers: _Servers = 2,
    ranks_per_server: _RanksPerServer = 2,
    transport: Annotated[str, typer.Option(help="Transport that the profile is for.")] = "peer",
    operations: Annotated[
        str, typer.Option(help="Operations to measure, with commas between.")
    ] = "all_to_all_single,dispatch,combine",
    sizes: Annotated[
        str, typer.Option(help="Bytes that a rank gives or gets in a call: 64K,1M,...")
    ] = "",
    blocks: Annotated[str, typer.Option(help="Numbers of blocks per rank to try: 1,2,...")] = "",
    lanes: Annotated[str, typer.Option(help="Lanes of a block to try: 256,512,...")] = "",
    chunks: Annotated[str, typer.Option(help="Bytes that puts are cut into: 32K,128K,...")] = "",
    tiles: Annotated[
        str, typer.Option(help="Bytes that a block moves at a time, of triton: 8K,16K,...")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Measures of each candidate.")] = 9,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File to write to; FASTKERN_PROFILE, or the user's, if not given."),
    ] = None,
) -> None:
    """Find good launch parameters for this device, and keep them in a tuning profile.

    Measures blocks, lanes and chunks of every operation at several sizes, with all ranks on this
    one device: links between devices are not measured. Communicators made later read the profile.
    """
    from rich.console import Console

    from .config import read_profile_path
    from .errors import FastkernError
    from .planner import Topology
    from .transports import MAKERS
    from .tuning.search_space import SearchOptions
    from .tuning.tune import run_tune

    try:
        if driver not in ("auto", "cuda", "hip", "host"):
            raise ValueError(f"driver must be auto, cuda, hip or host, not {driver!r}")
        if backend not in ("auto", "triton"):
            raise ValueError(f"backend must be auto or triton, not {backend!r}")
        if transport not in MAKERS:
            raise ValueError(f"transport must be one of {', '.join(MAKERS)}, not {transport!r}")
        path = output or read_profile_path()[0]
        if path is None:
            raise ValueError("where should the profile be written to? Give --output")
        options = SearchOptions(
            topology=Topology(servers, ranks_per_server),
            operations=[op.strip() for op in operations.split(",")],
            sizes=_numbers("sizes", sizes),
            num_blocks=_numbers("blocks", blocks),
            num_lanes=_numbers("lanes", lanes),
            chunk_bytes=_numbers("chunks", chunks),
            tile_bytes=_numbers("tiles", tiles),
            rounds=rounds,
        )
        wanted = None if driver == "auto" else driver
        kernels = "triton" if backend == "triton" else "cxx"
        run_tune(wanted, device, transport, options, path, Console(), kernels)
    except (ValueError, FastkernError) as error:
        raise _fail("tune", error) from None


_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas between; K, M and G are powers of 1024."""
    made = []
    for part in text.replace(" ", "").split(",") if text.strip() else []:
        unit = _UNITS.get(part[-1:].upper(), 1)
        digits = part[:-1] if unit > 1 else part
        if not digits.isdecimal():
            raise ValueError(f"{name}: {part!r} is no whole number")
        made.append(int(digits) * unit)
    return made


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
