"""Orders of puts between servers: whole tiles by list or by assignment, and split tiles."""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

Tiles = list[list[int]]  # [N][N] rows from server to server


class Put(NamedTuple):
    """Rows [row_begin, row_end) of the tile sender -> receiver, done on every rail at once."""

    sender: int
    receiver: int
    row_begin: int
    row_end: int
    ticks_begin: int
    ticks_end: int


def order_by_list(tiles: Tiles, most_rows: int) -> list[Put]:
    """Event-driven list; a put carries at most `most_rows`, the rest of its tile comes later."""
    n = len(tiles)
    left = [row[:] for row in tiles]
    sender_free, receiver_free = [0] * n, [0] * n
    puts: list[Put] = []
    now = 0
    while any(map(any, left)):
        row_left = [sum(row) for row in left]
        column_left = [sum(column) for column in zip(*left, strict=True)]
        idle = [
            (max(row_left[a], column_left[b]), left[a][b], -a, -b)
            for a in range(n)
            for b in range(n)
            if left[a][b] and sender_free[a] <= now and receiver_free[b] <= now
        ]
        if not idle:
            now = min(t for t in sender_free + receiver_free if t > now)
            continue
        _, rows, a, b = max(idle)
        a, b, rows = -a, -b, min(rows, most_rows)
        first = tiles[a][b] - left[a][b]
        left[a][b] -= rows
        sender_free[a] = receiver_free[b] = now + rows
        puts.append(Put(a, b, first, first + rows, now, now + rows))
    return puts


def order_by_assignment(tiles: Tiles) -> list[Put]:
    """Repeatedly the assignment with the largest sum of squared entries; then times by replay."""
    n = len(tiles)
    left = [row[:] for row in tiles]
    pairs: list[tuple[int, int]] = []
    while any(map(any, left)):
        best = max(permutations(range(n)), key=lambda p: sum(left[a][p[a]] ** 2 for a in range(n)))
        for a, b in enumerate(best):
            if left[a][b]:
                pairs.append((a, b))
                left[a][b] = 0
    sender_free, receiver_free = [0] * n, [0] * n
    puts: list[Put] = []
    for a, b in pairs:
        begin = max(sender_free[a], receiver_free[b])
        sender_free[a] = receiver_free[b] = begin + tiles[a][b]
        puts.append(Put(a, b, 0, tiles[a][b], begin, begin + tiles[a][b]))
    return sorted(puts, key=lambda put: put.ticks_begin)
