"""Whose turn it is on a communicator: one call at a time, on the caller's thread or queued."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from .errors import ClosedError, FastkernError

T = TypeVar("T")


class Fork(Protocol):
    """What a call on another thread needs of a device: made where the call is queued."""

    def run(self, body: Callable[[], T]) -> T:
        """The call, on the queue's thread, after what its caller did before."""

    def join(self, result: object) -> None:
        """On the thread that wants the result, when `run` has returned it."""


class InPlace:
    """Where there is no order but the host's."""

    def run(self, body: Callable[[], T]) -> T:
        """The call itself."""
        return body()

    def join(self, result: object) -> None:
        """Nothing."""


class Queued(Generic[T]):
    """A call in the queue, as a Future."""

    def __init__(self, future: Future[T], fork: Fork) -> None:
        self._future = future
        self._fork = fork

    def result(self, timeout: float | None = None) -> T:
        """Wait; the result, usable by what this thread does next, or the call's error."""
        result = self._future.result(timeout)
        self._fork.join(result)
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; the call's error, or None."""
        return self._future.exception(timeout)

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()


class Turns:
    """Runs calls one after the other. name: of the thread that queued calls run on.

    fork: makes the Fork of a queued call; its argument says whether the call may run beside what
    its caller does next, or its caller waits for it.
    """

    def __init__(self, name: str, fork: Callable[[bool], Fork] | None = None) -> None:
        self._name = name
        self._fork = fork if fork is not None else lambda own_lane: InPlace()
        self._lock = threading.Lock()
        self._running = threading.Lock()  # one call at a time, whoever makes it
        self._pool: ThreadPoolExecutor | None = None
        self._queued = 0
        self._started: str | None = None  # the operation that has been started, not finished
        self._closed = False  # no new calls
        self._released = False  # what calls run on is gone

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._closed

    @property
    def queued(self) -> bool:
        """Whether calls wait for their turn, or run on the queue's thread."""
        return self._queued > 0

    def check_open(self) -> None:
        """Raise ClosedError if `close` has been called."""
        with self._lock:
            self._check()

    def call(self, run: Callable[[], T]) -> T:
        """Run now, on this thread, or behind the calls that are queued."""
        with self._lock:
            self._check()
            self._refuse_if_started()
            future = self._enqueue(run, False) if self._queued else None
        return self._run(run) if future is None else future.result()

    def queue(self, run: Callable[[], T]) -> Queued[T]:
        """Run behind the calls that are queued, on a thread of its own."""
        with self._lock:
            self._check()
            self._refuse_if_started()
            return self._enqueue(run, True)

    def start(self, op: str, run: Callable[[], T]) -> Queued[T]:
        """As `queue`, but until `finish` every other call is refused."""
        with self._lock:
            self._check()
            self._refuse_if_started()
            future = self._enqueue(run, True)
            self._started = op
            return future

    def finish(self) -> None:
        """What has been started is over."""
        with self._lock:
            self._started = None

    def close(self, release: Callable[[], None]) -> None:
        """Refuse new calls, wait for those that run or are queued, then release; once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        with self._running:  # a call of another thread ends first
            self._released = True
            release()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the communicator is closed")

    def _refuse_if_started(self) -> None:
        if self._started is not None:
            raise FastkernError(
                f"{self._started}_start has not been finished: one call at a time per "
                "communicator; two in flight need two communicators"
            )

    def _enqueue(self, run: Callable[[], T], own_lane: bool) -> Queued[T]:
        fork = self._fork(own_lane)
        self._queued += 1
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return Queued(self._pool.submit(self._run_queued, lambda: fork.run(run)), fork)

    def _run(self, run: Callable[[], T]) -> T:
        with self._running:
            if self._released:
                raise ClosedError("the communicator is closed")
            return run()

    def _run_queued(self, run: Callable[[], T]) -> T:
        try:
            return self._run(run)
        finally:
            with self._lock:
                self._queued -= 1
