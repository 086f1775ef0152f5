"""Networks between servers: what a library that puts between them does for one communicator.

A network is also where the heap's memory comes from (PeerMemory): libraries put only into memory
that they have allocated or registered. Ranks of a server write one another's memory as with `peer`,
through the library's own pointers, since what the library has allocated cannot be shared by the
driver's handles.

In this order, on all ranks:

    start()               the library, and what kernels are given (`args`, NetworkArgs)
    after_load(module)    of each image that holds kernels which move rows
    open, place           the heap's parts; again with other data when it grows, between kernels
    before_unload(module), and unmap, free, close     each rank by itself, when no kernel runs;
                          memory may go first, or stay until other ranks have let go of it

Libraries wait for all ranks in some of their calls. Where one rank fails in such a call, or does
not get that far, the others would wait for ever: they wait in a thread, and give up when they are
told, or at the deadline (`Steps`). The thread stays behind until the library lets go of it; from
then on nothing that the library does for this communicator is waited for without an end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import FastkernError
from ..host_link import HostLink
from ..planner import Topology
from .driver import Driver
from .peer_memory import PeerMemory
from .together import FollowedError, logged, together

log = logging.getLogger("fastkern")

T = TypeVar("T")

_LOOK_S = 0.1  # between questions whether another rank has failed
_UNDO_S = 10.0  # for a library that is stuck to let go
_SHARE_OF_DEADLINE = 0.9  # so that ranks still meet, to say who has failed


class Network(PeerMemory, Protocol):
    """A library that puts between servers, set up for one communicator."""

    @property
    def args(self) -> int:
        """Address, on the device, of the NetworkArgs that kernels are given."""

    def start(self) -> None:
        """Everything but memory, on all ranks together.

        Raises FastkernError, the same on every rank; then nothing is left behind.
        """

    def after_load(self, module: Any) -> None:
        """A module of the driver's that holds kernels has been loaded. Raises FastkernError."""

    def before_unload(self, module: Any) -> None:
        """It will be unloaded."""


@dataclass(frozen=True)
class Setting:
    """What a network is made for. group: of torch.distributed, or a Meeting. check: raises where
    another rank has left the set-up altogether. link: between hosts, which are one or more.
    chunk_slots: of the flags, as kernels count them. timeout_s: for each step that waits for other
    ranks."""

    driver: Driver
    group: Any
    check: Callable[[], None]
    link: HostLink
    rank: int
    topology: Topology
    chunk_slots: int
    timeout_s: float

    @property
    def server_ranks(self) -> range:
        """The ranks of this rank's server."""
        size = self.topology.gpus_per_server
        first = self.rank // size * size
        return range(first, first + size)


class Steps:
    """Steps that all ranks take together, counted alike on all of them.

    stuck: a call of the library has been given up, and may be under way still.
    """

    def __init__(self, setting: Setting) -> None:
        self.stuck = False
        self._setting = setting
        self._count = 0

    def local(self, what: str, step: Callable[[], T]) -> list[T]:
        """A step in which no rank waits for another; see `together`."""
        return together(self._setting.group, what, step)

    def collective(self, what: str, call: Callable[[], T]) -> list[T]:
        """A call of the library in which it waits for all ranks, in the device's context.

        Every rank's result, or one error on all of them, as `together` raises it.
        """
        self._count += 1
        step, setting = self._count, self._setting

        def wait() -> T:
            running = _Running(call, setting.driver)
            limit_s = setting.timeout_s * _SHARE_OF_DEADLINE
            end = time.monotonic() + limit_s
            try:
                while not running.done.wait(_LOOK_S):
                    setting.check()
                    if setting.link.failed(step):
                        raise FollowedError("another rank has failed in it")
                    if time.monotonic() > end:
                        raise FastkernError(f"it has not ended within {limit_s:g} s")
            except BaseException:
                self.stuck = True
                raise
            if running.error is not None:
                raise running.error
            return running.value  # type: ignore[no-any-return]

        def telling() -> T:
            try:
                return wait()
            except BaseException:
                logged(what, lambda: setting.link.fail(step))
                raise

        return together(setting.group, what, telling)

    def undo(self, what: str, call: Callable[[], None]) -> None:
        """A call that lets go of something, failures being logged; not waited for without an end
        where the library may be stuck."""
        if not self.stuck:
            logged(what, call)
            return
        running = _Running(lambda: logged(what, call), self._setting.driver)
        if not running.done.wait(_UNDO_S):
            log.warning("%s: the library has not let go within %g s", what, _UNDO_S)


class _Running:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any], driver: Driver) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._driver = driver
        threading.Thread(target=self._run, name="fastkern-network", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._driver.current():
                self.value = self._call()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


@contextmanager
def library_call(what: str) -> Iterator[None]:
    """Errors of a library's binding, which are of any class, as FastkernError that names the call.

    Those that are fastkern's pass.
    """
    try:
        yield
    except FastkernError:
        raise
    except Exception as error:
        raise FastkernError(f"{what}: {str(error) or repr(error)}") from error
