"""What hosts tell one another through a store: records of meetings, who gave up, who has left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from fastkern import FastkernError
from fastkern.host_link import Carrier, HostLink

HOSTS = ["a", "a", "b", "b", "c"]


class Alone:
    """A meeting of one: what the first rank says is what all hear."""

    rank, num_ranks = 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        return ["token"] if isinstance(value, str) else [value]


@pytest.fixture
def links() -> list[HostLink]:
    """One for each rank, on one store."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [HostLink(Alone(), rank, HOSTS, store) for rank in range(len(HOSTS))]


def test_who_is_where(links: list[HostLink]) -> None:
    assert [link.local_ranks for link in links] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
    assert [link.leads for link in links] == [True, False, True, False, True]
    assert links[3].remote_ranks == [0, 1, 4]
    assert links[2].others() == {0: [0, 1], 4: [4]}


def test_records(links: list[HostLink]) -> None:
    """Any bytes; those of the meeting before last are gone."""
    content = bytes([0, 255, 7])
    assert links[0].fetch(1, 2) is None
    for meeting in (1, 2, 3):
        links[2].publish(meeting, content + bytes([meeting]))
    assert links[0].fetch(1, 2) is None
    assert [links[4].fetch(meeting, 2) for meeting in (2, 3)] == [content + b"\2", content + b"\3"]
    assert links[0].fetch(3, 4) is None


def test_who_gave_up_first(links: list[HostLink]) -> None:
    assert links[4].aborted() is None
    links[1].abort(7, 1)
    links[2].abort(8, 2)
    assert links[4].aborted() == links[0].aborted() == (7, 1)


def test_who_has_left(links: list[HostLink]) -> None:
    assert links[0].remaining() == [2, 3, 4]
    links[3].leave()
    links[1].leave()  # of the same host: others see to that
    assert links[0].remaining() == [2, 4]
    assert links[4].remaining() == [0, 2]


def test_failed_steps(links: list[HostLink]) -> None:
    links[3].fail(2)
    assert [links[0].failed(step) for step in (1, 2, 3)] == [False, True, False]


def test_a_store_that_is_gone(links: list[HostLink]) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("connection reset")

    links[0]._store = Gone()
    for call in (
        lambda: links[0].publish(1, b""),
        lambda: links[0].fetch(1, 2),
        lambda: links[0].abort(1, 0),
        links[0].aborted,
        links[0].leave,
        links[0].remaining,
    ):
        with pytest.raises(FastkernError, match=r"hosts meet: connection reset"):
            call()


class HostRank:
    """As the extension's: records of a host's ranks, by meeting."""

    def __init__(self, present: set[int]) -> None:
        self.present = present
        self.posted: dict[int, bytes] = {}
        self.word = 0
        self.aborted: list[tuple[int, int]] = []

    def missing_records(self, meeting: int) -> list[int]:
        return [r for r in range(len(HOSTS)) if r not in self.present and r not in self.posted]

    def abort_word(self) -> int:
        return self.word

    def stand_in(self, rank: int) -> Any:
        host = self

        class StandIn:
            def post_record(self, meeting: int, record: Any) -> None:
                host.posted[rank] = record.tobytes()

            def abort_all(self, epoch: int) -> None:
                host.aborted.append((epoch, rank))
                host.word = 1

        return StandIn()


def words(*values: int) -> Any:
    return np.array([[value] for value in values], dtype=np.uint64)


def test_a_meeting_of_hosts(links: list[HostLink]) -> None:
    """Each leader publishes its own and posts the others', whatever the order."""
    hosts = {first: HostRank(set(links[first].local_ranks)) for first in (0, 2, 4)}
    carriers = {r: Carrier(links[r], host, host.stand_in) for r, host in hosts.items()}
    read = lambda: words(10, 11, 12, 13, 14)  # noqa: E731
    for first in (4, 0, 2, 0, 4):
        carriers[first].advance(1, read, 0.001)
    expected = {rank: words(10 + rank).tobytes() for rank in range(len(HOSTS))}
    for first, host in hosts.items():
        assert host.posted == {r: expected[r] for r in links[first].remote_ranks}


def test_a_rank_that_is_late(links: list[HostLink]) -> None:
    """Nothing is published before a host is complete; others' records are posted all the same."""
    here, there = HostRank({0}), HostRank({2, 3})
    late, early = (Carrier(links[r], h, h.stand_in) for r, h in ((0, here), (2, there)))
    read = lambda: words(0, 1, 2, 3, 4)  # noqa: E731
    early.advance(1, read, 0.001)
    late.advance(1, read, 0.001)
    assert links[4].fetch(1, 0) is None
    assert sorted(here.posted) == [2, 3]
    here.present.add(1)
    late.advance(1, read, 0.001)
    assert links[4].fetch(1, 0) == words(0, 1).tobytes()


def test_another_host_gives_up(links: list[HostLink]) -> None:
    host = HostRank({0, 1})
    links[3].abort(5, 3)
    carrier = Carrier(links[0], host, host.stand_in)
    carrier.advance(1, lambda: words(0, 1, 2, 3, 4), 0.001)
    assert host.aborted == [(5, 3)]
