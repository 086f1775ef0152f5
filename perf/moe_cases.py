"""What `moe_exchange` measures: named workloads, and recorded routing made on the spot."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from perf.recorded import Recorded, read_recorded
from perf.workloads import BURST_PERIOD, WORKLOADS, Routing, Shape

RECORDED = "recorded"
EVERY_K = (RECORDED, "uniform")  # measured at each top-k, the others at the largest


@dataclass(frozen=True)
class Case:
    """One workload at one top-k. routings: a call for each repeat."""

    name: str
    num_experts: int
    top_k: int
    routings: list[Routing]


def named_cases(
    shape: Shape, names: Iterable[str], top_ks: list[int], repeats: int, every: bool
) -> list[Case]:
    """Named workloads. Repeat i is step i; of a burst only its loud steps.

    every: at every top-k, not only those of EVERY_K.
    """
    found = []
    for name in names:
        make = WORKLOADS[name]
        for top_k in top_ks if every or name in EVERY_K else top_ks[-1:]:
            at = [BURST_PERIOD * (i + 1) - 1 if name == "burst" else i for i in range(repeats)]
            calls = [make(replace(shape, top_k=top_k, step=step)) for step in at]
            found.append(Case(name, shape.num_experts, top_k, calls))
    return found


def recorded_cases(
    recorded: Recorded, num_ranks: int, num_tokens: int, top_ks: list[int], repeats: int
) -> list[Case]:
    """Recorded routing at each top-k up to what was recorded, as the first choices of a token.

    Repeats take the layers of the last step, then those of the step before, and begin again.
    """
    places = [
        (step, layer)
        for step in reversed(range(recorded.num_steps))
        for layer in range(recorded.num_layers)
    ]
    at = [places[i % len(places)] for i in range(repeats)]
    return [
        Case(
            RECORDED,
            recorded.num_experts,
            top_k,
            [recorded.call(step, layer, num_ranks, num_tokens, top_k) for step, layer in at],
        )
        for top_k in top_ks
        if top_k <= recorded.top_k
    ]


def obtain_recorded(path: Path | None, options: list[str]) -> tuple[Recorded | None, str]:
    """The routing of a file, or, without one, of a model trained now; or None and why not.

    options: of `fastkern train-demo`. A file that was asked for and is wrong raises.
    """
    if path is not None:
        recorded = read_recorded(path)
        return recorded, recorded.source
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "routing.npz"
        command = [sys.executable, "-c", "from fastkern.cli import main; main()", "train-demo"]
        run = subprocess.run(
            [*command, "--record", str(made), *options], capture_output=True, text=True, check=False
        )
        if run.returncode or not made.exists():
            said = re.sub(r"[^ -~]+", " ", run.stderr or run.stdout)  # without typer's boxes
            return (
                None,
                f"not made: train-demo ended with {run.returncode}: {' '.join(said.split())}",
            )
        recorded = read_recorded(made)
        return recorded, recorded.source
