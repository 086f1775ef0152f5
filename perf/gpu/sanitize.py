"""Small calls under compute-sanitizer: bad memory accesses, and races in shared memory.

The tool checks what a launch does, many times slower than it runs; a tool that is not there, or
that refuses the device, is said and is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.planner import Topology
from tests.device.virtual_cases import check_moe, check_random_traffic, options
from tests.device.virtual_static_cases import StaticCase, check_steps
from tests.moe_cases import Case as MoeCase
from tests.moe_cases import Data

from .cases import Case, run_cases
from .session import Session, begin

TOOLS = ("memcheck", "racecheck")
_PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
_TIMEOUT_S = 60.0


def find_tool() -> str | None:
    """The tool's path, or None."""
    found = shutil.which("compute-sanitizer")
    return found or next((place for place in _PLACES if Path(place).exists()), None)


def small_cases(session: Session) -> Iterator[Case]:
    """An all-to-all, a dispatch and combine of each layout, and a static one, on 2x2 ranks."""
    lanes = min(64, session.scale.lanes[0])
    given = options(policy="whole", progress_timeout_s=_TIMEOUT_S)

    def all_to_all() -> None:
        rng = np.random.default_rng(session.seed)
        with VirtualCluster(session.driver, Topology(2, 2), 2, lanes, options=given) as cluster:
            check_random_traffic(cluster, rng, 5, 9, "ragged")

    yield Case("all_to_all", all_to_all)
    for layout in ("expert", "rank"):

        def moe(layout: str = layout) -> None:
            case = MoeCase(layout, session.seed, layout=layout, topk=3, bias="row", num_tokens=4)
            with VirtualCluster(session.driver, Topology(2, 2), 2, lanes, options=given) as cluster:
                check_moe(cluster, Data(case, 2, 4))

        yield Case(f"dispatch and combine, {layout} layout", moe)

    def static() -> None:
        rng = np.random.default_rng(session.seed)
        with VirtualCluster(session.driver, Topology(2, 2), 2, lanes, options=given) as cluster:
            check_steps(cluster, StaticCase(most=4), 1, rng)

    yield Case("static exchange", static)


def verdict(output: str, code: int) -> tuple[bool | None, str]:
    """What a run of the tool says: right or wrong, or None where it could not check; and why."""
    summaries = [line for line in output.splitlines() if "SUMMARY:" in line]
    text = summaries[-1].strip("= ") if summaries else "no summary"
    last = output.strip().splitlines()[-1:] or [""]
    if "Device not supported" in output or not summaries:
        return None, f"the tool could not check (exit {code}): {last[0][:200]}"
    return code == 0, f"exit {code}, {text}" if code else ""


def run_tool(session: Session, path: str, tool: str, seconds: float) -> bool:
    """The small cases under one of the tools; returns whether something was found."""
    inner = session.args.out.with_suffix(f".{tool}.json")
    command = [path, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m"]
    command += ["perf.gpu.sanitize", "--inner", "--target", session.args.target]
    command += ["--kernels", session.args.kernels]
    command += ["--out", str(inner), "--seed", str(session.seed), "--seconds", str(seconds)]
    start = time.monotonic()
    # A session of its own, so that the tool's child ends with it.
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        session.record.add_facts(**{f"{tool}_cut": f"{tool}: cut after {seconds:.0f} s"})
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    print(output[-4000:], flush=True)
    ok, text = verdict(output, running.returncode)
    if ok is None:
        session.record.add_facts(**{f"{tool}_cut": f"{tool}: {text}"})
        return False
    session.record.add_case("sanitizer", tool, ok, time.monotonic() - start, text)
    return not ok


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a tool found something, or a case was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inner", action="store_true", help="run the cases, without the tool")
    session = begin(parser, arguments)
    path = find_tool() if session.args.target == "cuda" else None
    try:
        if session.args.inner:
            return 1 if run_cases(session, "small", small_cases(session)) else 0
        if path is None:
            why = "was not found" if session.args.target == "cuda" else "checks CUDA devices only"
            session.record.add_facts(detail=f"compute-sanitizer {why}: cases run without it")
            return 1 if run_cases(session, "small", small_cases(session)) else 0
    finally:
        session.driver.close()
    share = session.args.seconds / len(TOOLS)
    found = [run_tool(session, path, tool, share) for tool in TOOLS]
    return 1 if any(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
