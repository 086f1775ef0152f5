"""A process that interprets Triton's kernels.

Triton looks for TRITON_INTERPRET when it is imported, so whoever tests kernels without a GPU needs
a process that sets it first. One serves many cases, since starting Python takes seconds.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class CaseFailed(Exception):
    """A body raised; the message is its traceback."""


class Interpreter:
    """Runs `body(*args)` in a spawned process where kernels are interpreted; a context manager.

    Bodies are functions of a module's top level; they, their arguments and results are pickled. A
    process that has ended, or does not answer in time, is replaced for the next body.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> Any:
        """What the body returns. Raises CaseFailed, TimeoutError, or EOFError where it has ended
        the process."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps((body, args)))
            if not self._connection.poll(timeout_s):
                raise TimeoutError(f"{body.__name__}{args} takes more than {timeout_s} s")
            value, trace = pickle.loads(self._connection.recv_bytes())
        except BaseException:
            self.close()
            raise
        if trace:
            raise CaseFailed(trace)
        return value

    def close(self) -> None:
        """End the process."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def _serve(connection: Connection) -> None:
    """The process: cases until the other side closes."""
    assert "triton" not in sys.modules, "imported before TRITON_INTERPRET is set"
    os.environ["TRITON_INTERPRET"] = "1"
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        value, trace = None, ""
        try:
            body, args = pickle.loads(message)  # imports the body's module, and with it Triton
            value = body(*args)
        except BaseException:
            trace = traceback.format_exc()
        connection.send_bytes(pickle.dumps((value, trace)))
