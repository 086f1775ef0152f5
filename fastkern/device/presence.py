"""Which ranks may still use a heap: words that need no barrier and outlive their writers.

A rank frees memory that others have mapped when each of them has let go of it or has died. A
barrier would hang where one has died, so every rank has a word of its own in shared memory, which
it sets when it has let go. Ranks of other hosts, where they reach a heap over a network, say so
through the link between hosts; one that has died there has never let go.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .. import bootstrap
from ..errors import FastkernError
from ..heap import ProcessIdentity, fresh_name, remove_leftovers
from ..host_link import HostLink
from ..kernels import _host
from .together import logged, together


class Presence:
    """Words of a group's ranks. Made by all ranks together.

    hosts, processes: of each rank. link: to ranks of other hosts which use the heap too.
    local_ranks: those on this rank's host, itself included.
    """

    def __init__(
        self,
        group: Any,
        hosts: Sequence[str],
        processes: Sequence[ProcessIdentity],
        link: HostLink | None = None,
    ) -> None:
        self._link = link
        self.rank = bootstrap.rank_of(group)
        self.local_ranks = [r for r, host in enumerate(hosts) if host == hosts[self.rank]]
        self._processes = processes
        num_bytes = 8 * len(hosts)
        first = self.local_ranks[0]
        made: list[_host.SharedMemory] = []

        def make() -> str:
            if self.rank != first:
                return ""
            remove_leftovers()
            name = fresh_name()
            made.append(_host.SharedMemory(name, num_bytes, create=True))
            return name

        try:
            names = together(group, "shared memory", make)

            def map_words() -> None:
                if self.rank != first:
                    made.append(_host.SharedMemory(names[first], num_bytes, create=False))

            together(group, "shared memory", map_words)
        finally:
            if made and self.rank == first:
                made[0].unlink()
        self._memory = made[0]
        self._words = (ctypes.c_uint64 * len(hosts)).from_address(self._memory.address)

    def leave(self) -> None:
        """This rank has let go of all that others have made."""
        self._words[self.rank] = 1
        if self._link is not None:
            logged("leaving the heap", self._link.leave)

    def close(self) -> None:
        """Nobody remains, and nothing more is asked: let go of the words."""
        self._words = (ctypes.c_uint64 * 0)()
        del self._memory

    def remaining(self) -> list[int]:
        """Ranks that may still use what this rank has made."""
        here = [r for r in self.local_ranks if r != self.rank and not self._gone(r)]
        if self._link is None or here:
            return here
        try:
            return self._link.remaining()
        except FastkernError:  # the store has gone, as it does when processes end: who knows
            return self._link.remote_ranks

    def _gone(self, rank: int) -> bool:
        return bool(self._words[rank]) or not self._processes[rank].alive()
