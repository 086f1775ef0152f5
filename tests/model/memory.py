"""Memory by position: what lies in a row's place, and whether anybody has read it yet.

The bytes of call e and of call e + 1 are the same places, so that a write that comes too early or a
read that comes too late is seen. A content is (call, row), a row is (source rank, destination rank,
index).
"""

from __future__ import annotations

Row = tuple[int, int, int]
Content = tuple[int, Row]

SEND, RECEIVING, WINDOW, INPUT, OUTPUT = range(5)  # regions; the first three lie in the heap
REGION_NAMES = ("send staging", "receive staging", "window", "input", "output")


class Fault(Exception):
    """What a run found: a kind that tests compare, and the circumstances."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Region:
    """Rows of one buffer of one rank."""

    __slots__ = ("content", "freed", "name", "unread")

    def __init__(self, name: str, num_rows: int) -> None:
        self.name = name
        self.content: list[Content | None] = [None] * num_rows
        self.unread = [False] * num_rows
        self.freed = False

    def write(self, position: int, content: Content) -> None:
        if self.freed:
            raise Fault("freed memory", f"write to row {position} of an old {self.name}")
        if self.unread[position]:
            raise Fault(
                "overwrite",
                f"row {position} of {self.name} held {self.content[position]}, unread: {content}",
            )
        self.content[position] = content
        self.unread[position] = True

    def read(self, position: int, expected: Content) -> None:
        if self.freed:
            raise Fault("freed memory", f"read of row {position} of an old {self.name}")
        if self.content[position] != expected:
            raise Fault(
                "stale read",
                f"row {position} of {self.name} holds {self.content[position]}, not {expected}",
            )
        self.unread[position] = False


class Heap:
    """The moving part of one rank's symmetric heap; replaced as a whole when it grows."""

    def __init__(self, rank: int, num_rows: tuple[int, int, int]) -> None:
        self.num_rows = num_rows
        self.regions = [
            Region(f"{REGION_NAMES[k]} of rank {rank}", num_rows[k])
            for k in (SEND, RECEIVING, WINDOW)
        ]

    def free(self) -> None:
        for region in self.regions:
            region.freed = True
