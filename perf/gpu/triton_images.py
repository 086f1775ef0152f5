"""Compiles the kernels in Triton, each entry in a process of its own, all at once.

Exit code NOT_RUN, and the reason among the facts, where Triton is not there: then the steps after
this one are not run either. What is compiled lies in the cache of compiled kernels afterwards; what
no time was left for is compiled by the step that needs it.

In a dry run there is nothing to compile: Triton interprets, as TRITON_INTERPRET=1 has it.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any

from fastkern.device.triton_library import import_triton, interpreting
from fastkern.device.virtual_kernels import ENTRY_OF, Kernels, default_load, is_triton
from fastkern.errors import DeviceUnavailableError

from .report import NOT_RUN
from .session import GPU_TRITON, Session, begin


@dataclass(frozen=True)
class Job:
    """An entry's kernels for blocks of so many lanes."""

    target: str
    architecture: str
    entry: str
    num_lanes: int

    def run(self, answer: Any) -> None:
        """In a process of its own, which needs no GPU. Sends what went wrong, or nothing."""
        try:
            default_load(_device(self.target, self.architecture))(self.entry, self.num_lanes)
            answer.send("")
        except Exception as error:
            answer.send(f"{type(error).__name__}: {error}")


def _device(target: str, architecture: str, most_lanes: int = 0) -> Any:
    """What compiling has to know of a driver with the kernels in Triton."""
    properties = SimpleNamespace(architecture=architecture, most_lanes=most_lanes)
    return SimpleNamespace(target=target, kernels="triton", properties=lambda: properties)


@dataclass
class _Running:
    job: Job
    process: Any
    answer: Any
    start: float = field(default_factory=time.monotonic)


def missing_triton() -> str:
    """Why there are no kernels in Triton here, or nothing. Raises DeviceUnavailableError where
    Triton is installed and cannot be imported."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import_triton()
    except DeviceUnavailableError as error:
        if error.__cause__ is not None:
            raise
        return str(error)  # too old
    return ""


def jobs_of(target: str, architecture: str, most_lanes: int) -> list[Job]:
    """What the steps after this one need of a device, what they need first at the start.
    most_lanes: of a block."""
    device = _device(target, architecture, most_lanes)
    kernels = Kernels(device, default_load(device), 1, 1)
    wanted = (
        (ENTRY_OF[name], kernels.lanes_of(name, lanes))
        for lanes in GPU_TRITON.lanes
        for name in ENTRY_OF
        if is_triton(device, ENTRY_OF[name])
    )
    return [Job(target, architecture, *of_entry) for of_entry in dict.fromkeys(wanted)]


def compiled(jobs: Sequence[Job], at_once: int, end: float) -> Iterator[tuple[Job, float, str]]:
    """Runs them, and tells of each that ends: its seconds, and what went wrong. Those that have not
    ended by `end`, on time.monotonic's clock, are stopped."""
    context = mp.get_context("spawn")
    waiting, running = list(jobs), dict[int, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=job.run, args=(sender,), daemon=True)
                process.start()
                sender.close()
                running[process.sentinel] = _Running(job, process, receiver)
            ended = connection.wait(list(running), timeout=end - time.monotonic())
            if not ended:
                return
            for sentinel in ended:
                done = running.pop(int(sentinel))  # type: ignore[call-overload]
                done.process.join()
                yield done.job, time.monotonic() - done.start, _answer_of(done)
    finally:
        for left in running.values():
            left.process.kill()
            left.process.join()


def _answer_of(done: _Running) -> str:
    try:
        return str(done.answer.recv())
    except EOFError:
        return f"the process ended with exit code {done.process.exitcode}"


def compile_all(session: Session, jobs: Sequence[Job]) -> bool:
    """Records each; returns whether all that ended are right."""
    start, at_once, slowest, right = time.monotonic(), os.cpu_count() or 1, 0.0, True
    left = {f"{job.entry}, {job.num_lanes} lanes" for job in jobs}
    for job, seconds, error in compiled(jobs, at_once, session.end):
        name = f"{job.entry}, {job.num_lanes} lanes"
        left.discard(name)
        session.record.add_case("compile", name, not error, seconds, error)
        print(f"{name}: {seconds:.1f} s {error}", flush=True)
        slowest, right = max(slowest, seconds), right and not error
    if left:
        session.record.add_facts(compile_cut=f"no time to compile {'; '.join(sorted(left))}")
    text = f"{len(jobs) - len(left)} images compiled in {time.monotonic() - start:.1f} s"
    session.record.add_facts(
        detail=f"Triton {import_triton().__version__}: {text}, {min(at_once, len(jobs))} at once, "
        f"the slowest {slowest:.1f} s"
    )
    return right


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a kernel does not compile, NOT_RUN where there is no Triton."""
    session = begin(argparse.ArgumentParser(description=__doc__), arguments)
    found = session.driver.properties()
    session.driver.close()
    try:
        missing = missing_triton()
    except DeviceUnavailableError as error:
        session.record.add_facts(detail=str(error))
        raise SystemExit(str(error)) from error
    if missing:
        session.record.add_facts(detail=f"not run: {missing}")
        print(missing)
        return NOT_RUN
    if session.args.target != "host":
        jobs = jobs_of(session.args.target, found.architecture, found.most_lanes)
        return 0 if compile_all(session, jobs) else 1
    if not interpreting():
        raise SystemExit("TRITON_INTERPRET=1 must be set where there is no GPU")
    version = import_triton().__version__
    session.record.add_facts(detail=f"Triton {version} interprets, one rank: nothing to compile")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
