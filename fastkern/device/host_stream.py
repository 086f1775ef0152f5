"""Streams, events and graphs of the driver that works on the CPU: a worker thread per stream."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .driver import DriverError

Work = Callable[[], None]


class Moment:
    """One recording of an event: reached when the stream comes to it, with what went wrong."""

    def __init__(self, capture: Capture | None, stream: HostStream) -> None:
        self.reached = threading.Event()
        self.time_ns = 0
        self.error: DriverError | None = None
        self.capture = capture  # recorded into a graph: nothing to wait for
        self.stream = stream
        self.place = stream.num_captured

    def check(self) -> None:
        """Raise what went wrong before it."""
        _raise(self.error)

    def refuse_captured(self, operation: str) -> None:
        """Nobody on the host may ask for what was recorded into a graph."""
        if self.capture is not None:
            raise DriverError(operation, "captured event")


@dataclass
class HostEvent:
    """An event; every recording replaces the one before."""

    timing: bool
    moment: Moment | None = None


@dataclass
class Capture:
    """Work that is recorded, in the order in which it was given: one that a device may run it in.

    joined: streams that work into it because they waited for one of its events, with how much of
    theirs the first stream waits for.
    """

    origin: HostStream
    thread: int
    work: list[Work] = field(default_factory=list)
    joined: dict[HostStream, int] = field(default_factory=dict)


class HostStream:
    """Runs what it is given in order, on a thread of its own.

    The first failure ends it: what follows is not run, and every later operation raises that error,
    as a GPU's does. Events recorded behind the failure carry it to streams that wait for them.
    """

    def __init__(self, name: str) -> None:
        self.capture: Capture | None = None
        self.num_captured = 0  # pieces of work that went into the capture
        self.error: DriverError | None = None
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, operation: str, work: Work) -> None:
        """Run `work` after what was submitted before; captured, keep it instead."""
        self.check()
        guarded = _guarded(operation, work)
        if self.capture is not None:
            self.capture.work.append(guarded)
            self.num_captured += 1
        else:
            self._queue.put(lambda: self._step(guarded))

    def record(self, event: HostEvent) -> None:
        """Reach the event here."""
        self.check()
        event.moment = moment = Moment(self.capture, self)
        if self.capture is None:
            self._queue.put(lambda: self._reach(moment))

    def wait(self, event: HostEvent) -> None:
        """Go on only when the event's last recording so far has been reached."""
        self.check()
        moment = event.moment
        if moment is None:
            return  # never recorded
        if moment.capture is None:
            if self.capture is not None:
                text = "a captured stream waits for work outside of the capture"
                raise DriverError("wait_event", "capture isolation", text)
            self._queue.put(lambda: self._await(moment))
            return
        capture = moment.capture
        if self.capture is None:
            if capture.origin.capture is not capture:
                raise DriverError("wait_event", "captured event", "its capture has ended")
            self.capture, self.num_captured = capture, 0
            capture.joined[self] = -1  # unlike any place, until the first stream waits for it
        elif self.capture is not capture:
            raise DriverError("wait_event", "capture merge", "the event is of another capture")
        if moment.stream in capture.joined and self is not moment.stream:
            capture.joined[moment.stream] = moment.place

    def synchronize(self) -> None:
        """Wait for all submitted; raise what failed."""
        if self.capture is not None:
            raise DriverError("synchronize", "capture unsafe", "the stream is captured")
        self.drain()
        self.check()

    def drain(self) -> None:
        """Wait for all submitted."""
        done = threading.Event()
        with self._ending:
            ended = self._ended
            if not ended:
                self._queue.put(done.set)
        if ended:
            self.join()
        else:
            done.wait()

    def check(self) -> None:
        """Raise what failed."""
        _raise(self.error)

    def end(self) -> None:
        """Take no more work; the thread ends after what it has."""
        with self._ending:
            self._ended = True
            self._queue.put(None)

    def running(self) -> bool:
        """Whether the thread has work, or has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread, after `end`."""
        self._thread.join()

    # -- on the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _step(self, work: Work) -> None:
        if self.error is None:
            try:
                work()
            except DriverError as error:
                self.error = error

    def _reach(self, moment: Moment) -> None:
        moment.time_ns = time.perf_counter_ns()
        moment.error = self.error
        moment.reached.set()

    def _await(self, moment: Moment) -> None:
        moment.reached.wait()
        self.error = self.error or moment.error


def begin_capture(stream: HostStream) -> None:
    """Record the stream's work from here on."""
    stream.check()
    if stream.capture is not None:
        raise DriverError("begin_capture", "invalid value", "the stream is captured already")
    stream.capture = Capture(stream, threading.get_ident())
    stream.num_captured = 0


def end_capture(stream: HostStream) -> list[Work]:
    """The work recorded; the stream and those that joined it run their work again."""
    capture = stream.capture
    if capture is None or capture.origin is not stream:
        raise DriverError("end_capture", "invalid value", "no capture began on this stream")
    stream.capture = None
    unjoined = False
    for other, place in capture.joined.items():
        unjoined |= place != other.num_captured
        other.capture = None
    if unjoined:
        text = "a stream that joined the capture was not waited for"
        raise DriverError("end_capture", "capture unjoined", text)
    return capture.work


def _raise(error: DriverError | None) -> None:
    """A new one each time, since every raise adds to an exception's traceback."""
    if error is not None:
        raise DriverError(*error.args) from error


def _guarded(operation: str, work: Work) -> Work:
    def run() -> None:
        try:
            work()
        except DriverError:
            raise
        except BaseException as error:
            raise DriverError(operation, type(error).__name__, str(error)) from error

    return run
