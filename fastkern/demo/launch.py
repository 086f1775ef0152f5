"""Ranks as processes: start them, gather what they return, and leave none behind."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from .errors import DemoError

_END_S = 3.0  # for a process to end, by itself or asked to

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Body = Callable[..., Any]


def run_ranks(
    num_ranks: int,
    body: Body,
    args: Sequence[Any],
    *,
    timeout_s: float,
    on_step: Callable[[], object] = lambda: None,
) -> list[Any]:
    """body(rank, step, *args) in a fresh process per rank; what they return, in rank order.

    step: a function of no arguments; `on_step` runs here each time a rank calls it. Raises
    DemoError when a rank raises, ends early, or has not returned after `timeout_s`. All processes
    have ended when this returns or raises; they also end when this process is killed.
    """
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    grace_s = 0.0
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(rank, theirs, body, tuple(args)))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        results = _gather(processes, pipes, timeout_s, on_step)
        grace_s = _END_S  # they have nothing left to do
        return results
    finally:
        _end(processes, grace_s)
        for pipe in pipes:
            pipe.close()


def _gather(
    processes: list[BaseProcess],
    pipes: list[Connection],
    timeout_s: float,
    on_step: Callable[[], object],
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    rank_of = {pipe: rank for rank, pipe in enumerate(pipes)}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank_of[pipe]) for pipe in waiting)
            raise DemoError(f"rank {late} not done after {timeout_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = rank_of[pipe]
            try:
                kind, *content = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):  # ended without a word
                processes[rank].join(_END_S)
                raise DemoError(f"rank {rank} {_how_ended(processes[rank])}") from None
            if kind == "error":
                raise DemoError(f"rank {rank}: {content[0]}", content[1])
            if kind == "result":
                results[rank] = content[0]
            else:
                on_step()
    return [results[rank] for rank in range(len(pipes))]


def _how_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was ended by signal {-code}"
    return f"ended early with exit code {code}"


def _end(processes: list[BaseProcess], grace_s: float) -> None:
    """Wait for processes to end by themselves, then end them, each harder than before."""
    for stop, wait_s in ((None, grace_s), ("terminate", _END_S), ("kill", _END_S)):
        deadline = time.monotonic() + wait_s
        for process in processes:
            if stop and process.is_alive():
                getattr(process, stop)()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))


def _enter(rank: int, pipe: Connection, body: Body, args: tuple[Any, ...]) -> None:
    """A rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its ranks
    _end_with_parent()
    message: tuple[Any, ...]
    try:
        message = ("result", body(rank, lambda: pipe.send_bytes(pickle.dumps(("step",))), *args))
    except DemoError as error:
        message = ("error", str(error), traceback.format_exc())
    except Exception as error:
        message = ("error", f"{type(error).__name__}: {error}", traceback.format_exc())
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, whatever it is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is None or not parent.is_alive():  # it died before the call
        os._exit(1)
