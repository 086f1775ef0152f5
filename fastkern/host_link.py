"""What hosts tell one another: words and records, through the store of the process group.

Ranks of one host meet in shared memory (entry.py). Where a communicator spans hosts, the first rank
of each carries for the others there: it publishes their records of a meeting as one value, and
posts those of other hosts in their stead: a handful of questions to the store for each call. A
store has what this needs and collectives lack: looks that do not wait, keys that say who is
missing, and no damage where a rank gives up or dies.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from . import bootstrap
from .errors import FastkernError
from .wait_records import abort_epoch, abort_origin, abort_word

log = logging.getLogger("fastkern")

T = TypeVar("T")

_ABORT = "abort"
_LEAST_PAUSE_S, _MOST_PAUSE_S = 2e-5, 1e-3  # between looks


class HostLink:
    """One rank's side. Made by all ranks of `group` together.

    hosts: of each rank. store: a c10d store that all ranks have; by default the process group's,
    with a connection of its own where the store has one to give.

    local_ranks: those of this rank's host. remote_ranks: all others. leads: whether this rank
    carries for its host. Every call raises FastkernError where the store cannot be reached.
    """

    def __init__(self, group: Any, rank: int, hosts: Sequence[str], store: Any = None) -> None:
        self.rank = rank
        ranks_of: dict[str, list[int]] = {}
        for r, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(r)
        self.local_ranks = ranks_of[hosts[rank]]
        self.remote_ranks = [r for r in range(len(hosts)) if r not in self.local_ranks]
        self.leads = rank == self.local_ranks[0]
        self._others = {ranks[0]: ranks for h, ranks in ranks_of.items() if h != hosts[rank]}
        token = bootstrap.gather(secrets.token_hex(8), group)[0]
        found = store if store is not None else bootstrap.default_store()
        prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
        self._store = prefixed(f"fastkern-{token}", _own_connection(found))

    # -- records -----------------------------------------------------------------------------------

    def publish(self, meeting: int, content: bytes) -> None:
        """This host's records of a meeting, for all other hosts.

        Nobody needs those of two meetings ago: whoever is in this one has read them.
        """
        first = self.local_ranks[0]
        self._ask(lambda: self._store.set(f"{meeting}-{first}", content))
        if meeting > 2:
            self._ask(lambda: self._store.delete_key(f"{meeting - 2}-{first}"))

    def others(self) -> dict[int, list[int]]:
        """The ranks of every other host, by the first of them."""
        return dict(self._others)

    def fetch(self, meeting: int, first: int) -> bytes | None:
        """What the host of rank `first` has published; None where it has not yet."""
        found = self.fetch_all(meeting, [first])
        return None if found is None else found[first]

    def fetch_all(self, meeting: int, firsts: Sequence[int]) -> dict[int, bytes] | None:
        """What several hosts have published, by their first ranks; None where one has not yet.

        Two questions to the store, however many hosts.
        """
        keys = [f"{meeting}-{first}" for first in firsts]
        if not self._ask(lambda: self._store.check(keys)):
            return None
        if self._store.has_extended_api():
            found = self._ask(lambda: self._store.multi_get(keys))
        else:
            found = self._ask(lambda: [self._store.get(key) for key in keys])
        return {first: bytes(content) for first, content in zip(firsts, found, strict=True)}

    # -- who has given up, and who has left --------------------------------------------------------

    def abort(self, epoch: int, origin: int) -> None:
        """Tell the other hosts that a rank has given up; the first to say so stays."""
        word = str(abort_word(epoch, origin))
        self._ask(lambda: self._store.compare_set(_ABORT, "", word))

    def aborted(self) -> tuple[int, int] | None:
        """(epoch, origin) that `abort` was told."""
        if not self._has(_ABORT):
            return None
        word = int(self._ask(lambda: bytes(self._store.get(_ABORT))))
        return abort_epoch(word), abort_origin(word)

    def leave(self) -> None:
        """This rank has let go of all that others have made."""
        self._ask(lambda: self._store.set(f"left-{self.rank}", "1"))

    def remaining(self) -> list[int]:
        """Ranks of other hosts that may still use what this rank has made."""
        return [r for r in self.remote_ranks if not self._has(f"left-{r}")]

    # -- steps that fail -------------------------------------------------------------------------

    def fail(self, step: int) -> None:
        """This rank has failed in a step, which all ranks count alike."""
        self._ask(lambda: self._store.set(f"failed-{step}", "1"))

    def failed(self, step: int) -> bool:
        """Whether a rank has failed in a step. Does not wait."""
        return self._has(f"failed-{step}")

    # -- the store ---------------------------------------------------------------------------------

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            text = f"the store of the process group, through which hosts meet: {error}"
            raise FastkernError(text) from error


class Carrier:
    """What the first rank of a host does for a meeting while it waits for records.

    host: its HostRank. stand_in: makes the HostRank of a rank elsewhere, whose words here it
    writes.
    """

    def __init__(self, link: HostLink, host: Any, stand_in: Callable[[int], Any]) -> None:
        self._link = link
        self._host = host
        self._stand_in = {rank: stand_in(rank) for rank in link.remote_ranks}
        self._meeting = 0
        self._published = True
        self._awaited: dict[int, list[int]] = {}

    def advance(self, meeting: int, read: Callable[[], Any], slice_s: float) -> None:
        """Bring a meeting on for up to slice_s. read: all ranks' records as they are here,
        [R, words]."""
        if self._meeting != meeting:
            self._meeting, self._published = meeting, False
            self._awaited = self._link.others()
        end, pause_s = time.monotonic() + slice_s, _LEAST_PAUSE_S
        while not self._step(read) and not self._host.abort_word():
            if time.monotonic() > end:
                self._hear()
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _step(self, read: Callable[[], Any]) -> bool:
        """Publish and post what can be; whether all is done."""
        meeting, link = self._meeting, self._link
        missing = self._host.missing_records(meeting)
        if not self._published and set(link.local_ranks).isdisjoint(missing):
            link.publish(meeting, read()[link.local_ranks].tobytes())
            self._published = True
        if self._awaited:
            found = link.fetch_all(meeting, list(self._awaited))
            for first, content in (found or {}).items():
                self._post(first, content)
        return self._published and not self._awaited

    def _post(self, first: int, content: bytes) -> None:
        ranks = self._awaited.pop(first)
        records = np.frombuffer(content, dtype=np.uint8).reshape(len(ranks), -1)
        for rank, record in zip(ranks, records, strict=True):
            self._stand_in[rank].post_record(self._meeting, record)

    def _hear(self) -> None:
        """Post what has come from some hosts, so that it shows who is missing; pass on that a rank
        of another host has given up."""
        for first in list(self._awaited):
            if (content := self._link.fetch(self._meeting, first)) is not None:
                self._post(first, content)
        if (told := self._link.aborted()) is not None:
            epoch, origin = told
            self._stand_in.get(origin, self._host).abort_all(epoch)


def _own_connection(store: Any) -> Any:
    """One serves a question at a time: others in the process should not wait for ours."""
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return clone()
    except NotImplementedError:  # of a kind that has no connections
        return store
    except RuntimeError as error:
        log.warning("meetings of hosts share the process group's connection: %s", error)
        return store
