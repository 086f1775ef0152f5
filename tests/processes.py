"""Ranks as processes: a pool that runs functions on W spawned workers, which form a gloo group.

Starting Python and PyTorch takes seconds, so a pool runs many cases. A worker that dies or does not
answer in time makes the pool unusable; it is then closed and a fresh one is made for later cases.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

GROUP_TIMEOUT_S = 60.0
_HARMLESS = ("ValueError", "TypeError", "MemoryError", "FastkernError")


class Outcome(NamedTuple):
    """What a rank's function returned or raised; `trace` is the error's traceback as text."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class RanksFailed(Exception):
    """Ranks raised where all should have returned."""


class ProcessEnded(Exception):
    """A worker ended before it answered."""


class Pool:
    """W processes that run `body(rank, num_ranks, *args)`; a context manager.

    num_ranks: W. folder: where the group's store lies. Bodies are functions of a module's top
    level; they, their arguments and results are pickled. In a worker the default group is gloo
    over loopback, PyTorch has one thread, and of the variables FASTKERN_ and LOCAL_WORLD_SIZE only
    FASTKERN_PROFILE is set: no tuning profile of whoever runs the tests counts. Communicators made
    by `fastkern.init` are closed after each case.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        context = mp.get_context("spawn")
        self.num_ranks = num_ranks
        self.usable = True
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, num_ranks, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.pids = [int(process.pid) for process in self._processes]

    # -- running ---------------------------------------------------------------------------------

    def start(self, body: Callable[..., Any], *args: Any) -> None:
        """Have every rank run the body; `finish` collects."""
        message = pickle.dumps((body, args))
        for connection in self._connections:
            connection.send_bytes(message)

    def answered(self) -> bool:
        """Whether every rank has ended the body, or its process."""
        return all(c.poll() for c in self._connections)

    def finish(self, timeout_s: float = 60.0) -> list[Outcome]:
        """The outcomes in rank order. Workers that do not answer in time are killed."""
        end = time.monotonic() + timeout_s
        outcomes: dict[int, Outcome] = {}
        waiting = {c: rank for rank, c in enumerate(self._connections)}
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = Outcome(error=ProcessEnded(f"exit code {code}"))
        for rank in waiting.values():
            os.kill(self.pids[rank], signal.SIGUSR1)  # its stacks, to stderr
            outcomes[rank] = Outcome(error=TimeoutError(f"no answer within {timeout_s:g} s"))
        if waiting:
            time.sleep(0.2)
        result = [outcomes[rank] for rank in range(self.num_ranks)]
        if any(o.error is not None and not _harmless(o.error) for o in result):
            self.close()
        return result

    def outcomes(
        self, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> list[Outcome]:
        """Run the body on every rank, whatever comes of it."""
        self.start(body, *args)
        return self.finish(timeout_s)

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Every rank's result. Raises RanksFailed with the tracebacks of those that raised."""
        return values(self.outcomes(body, *args, timeout_s=timeout_s))

    def errors(
        self, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> list[BaseException]:
        """Every rank's error; each of them must raise."""
        return errors(self.outcomes(body, *args, timeout_s=timeout_s))

    # -- life ------------------------------------------------------------------------------------

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Signal one worker."""
        assert self._processes[rank].is_alive()
        os.kill(self.pids[rank], number)

    def close(self) -> None:
        """End the workers, those that do not end by themselves by force."""
        self.usable = False
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        end = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The results; raises RanksFailed where a rank raised."""
    failed: dict[str, list[int]] = {}
    for rank, o in enumerate(outcomes):
        if o.error is not None:
            failed.setdefault(f"{o.error!r}\n{o.trace}", []).append(rank)
    if failed:
        raise RanksFailed("\n".join(f"ranks {who}: {text}" for text, who in failed.items()))
    return [o.value for o in outcomes]


def errors(outcomes: Sequence[Outcome]) -> list[BaseException]:
    """The errors; fails where a rank returned."""
    returned = {rank: o.value for rank, o in enumerate(outcomes) if o.error is None}
    assert not returned, f"ranks returned instead of raising: {returned}"
    return [o.error for o in outcomes if o.error is not None]


def _harmless(error: BaseException) -> bool:
    """Whether the group is in order after this error: one that a case may expect."""
    return any(kind.__name__ in _HARMLESS for kind in type(error).__mro__)


def _work(rank: int, num_ranks: int, store: str, connection: Connection) -> None:
    """A worker's life: join the group, then run what comes until nothing does."""
    for name in [k for k in os.environ if k.startswith("FASTKERN_")] + ["LOCAL_WORLD_SIZE"]:
        os.environ.pop(name, None)
    os.environ["FASTKERN_PROFILE"] = "built-in"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    import torch.distributed as dist

    import fastkern

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            message = b""  # the tests' process is gone
        if not message:
            os._exit(0)  # a group whose peers have died cannot be taken down in order
        try:
            body, args = pickle.loads(message)
            outcome = Outcome(value=body(rank, num_ranks, *args))
        except BaseException as error:
            outcome = Outcome(error=error, trace=traceback.format_exc())
        finally:
            fastkern.shutdown()
        connection.send_bytes(_pickled(outcome))


def _pickled(outcome: Outcome) -> bytes:
    try:
        message = pickle.dumps(outcome)
        pickle.loads(message)
        return message
    except Exception as error:
        return pickle.dumps(Outcome(error=TypeError(f"{outcome!r}: {error}"), trace=outcome.trace))
