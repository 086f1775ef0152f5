"""Python's view of a stage table: structured arrays over its bytes, made from the header's field lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _core

_CONSTANTS = _core.constants()
MAGIC: int = _CONSTANTS["MAGIC"]
VERSION: int = _CONSTANTS["VERSION"]
NO_SLOT: int = _CONSTANTS["NO_SLOT"]
VALUE_BITS: int = _CONSTANTS["VALUE_BITS"]
QUEUES: tuple[str, ...] = tuple(_CONSTANTS["QUEUES"])
PHASES: tuple[int, ...] = tuple(_CONSTANTS["PHASES"])
POLICIES: tuple[str, ...] = tuple(_CONSTANTS["POLICIES"])

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype([(field, "<" + kind) for field, kind in fields])
    for name, fields in _core.schema().items()
}


def flag_slots(servers: int, gpus_per_server: int, chunk_slots: int) -> int:
    """64-bit flag words of one rank."""
    return int(_core.flag_slots(servers, gpus_per_server, chunk_slots))


class Item(NamedTuple):
    """One unit of work of a rank: a chunk of a stream. `empty`: no rows of this rank in the chunk."""

    queue: str
    stage: int  # within the queue
    stream: int
    chunk: int
    plan_time: int
    empty: bool


class Part(NamedTuple):
    """The part of a segment inside a chunk; rows as in Segment."""

    stream_row: int
    row: int
    num_rows: int
    peer: int
    slot: int


class DataLayout(NamedTuple):
    """Byte offsets of a rank's send staging, receive staging and window, and their sum."""

    send: int
    receive: int
    window: int
    bytes: int


class StageTable:
    """One rank's stage table.

    bytes: [table_bytes] uint8, as the kernels read it. header: one record. queues, posts, stages,
    streams, segments, links: structured arrays, views of the same bytes.

    Raises ValueError when the bytes are not a table of this version and size.
    """

    __slots__ = ("_views", "bytes")

    def __init__(self, block: npt.NDArray[np.uint8]) -> None:
        self.bytes = block
        self._views: dict[str, Any] | None = None

    def _view(self, name: str) -> Any:
        if self._views is None:
            self._views = self._make_views()
        return self._views[name]

    def _make_views(self) -> dict[str, Any]:
        size = DTYPES["Header"].itemsize
        if len(self.bytes) < size:
            raise ValueError(f"a stage table has at least {size} bytes, not {len(self.bytes)}")
        header = self.bytes[:size].view(DTYPES["Header"])[0]
        if header["magic"] != MAGIC or header["version"] != VERSION:
            raise ValueError(
                f"not a stage table of version {VERSION}: magic {int(header['magic']):#x}, "
                f"version {int(header['version'])}"
            )
        views: dict[str, Any] = {"Header": header}
        at = size
        counts = {
            "Queue": len(QUEUES),
            "Post": int(header["num_posts"]),
            "Stage": int(header["num_stages"]),
            "Stream": int(header["num_streams"]),
            "Segment": int(header["num_segments"]),
            "Link": int(header["num_links"]),
        }
        for name, count in counts.items():
            end = at + count * DTYPES[name].itemsize
            views[name] = self.bytes[at:end].view(DTYPES[name]) if end <= len(self.bytes) else None
            at = end
        if at != len(self.bytes) or at != int(header["table_bytes"]):
            raise ValueError(
                f"the table should have {at} bytes, its header says {int(header['table_bytes'])}, "
                f"it has {len(self.bytes)}"
            )
        return views

    header = property(lambda self: self._view("Header"))
    queues = property(lambda self: self._view("Queue"))
    posts = property(lambda self: self._view("Post"))
    stages = property(lambda self: self._view("Stage"))
    streams = property(lambda self: self._view("Stream"))
    segments = property(lambda self: self._view("Segment"))
    links = property(lambda self: self._view("Link"))

    @property
    def rank(self) -> int:
        """The rank that this table is for."""
        return int(self.header["rank"])

    def data_layout(self) -> DataLayout:
        """Where the parts of this call's heap start: as DataLayout of the header, in bytes."""
        return DataLayout(**_core.data_layout(self.bytes))

    def items(self, queue: str) -> Iterator[Item]:
        """The items of a queue in order, empty ones included."""
        index = QUEUES.index(queue)
        row = self.queues[index]
        for k in range(int(row["num_stages"])):
            stage = self.stages[int(row["first_stage"]) + k]
            num_chunks, num_streams = int(stage["num_chunks"]), int(stage["num_streams"])
            begin, end = int(stage["ticks_begin"]), int(stage["ticks_end"])
            ended = 1 if queue in ("receive", "land") else 0
            for chunk in range(num_chunks):
                ticks = begin + (end - begin) * (chunk + ended) // num_chunks
                for x in range(num_streams):
                    stream = int(stage["first_stream"]) + x
                    empty = next(self.parts(stream, chunk), None) is None
                    yield Item(queue, k, stream, chunk, ticks * 4 + PHASES[index], empty)

    def parts(self, stream: int, chunk: int) -> Iterator[Part]:
        """The segments of a stream inside a chunk, cut to it."""
        s = self.streams[stream]
        begin = chunk * int(s["chunk_rows"])
        end = min(begin + int(s["chunk_rows"]), int(s["num_rows"]))
        first = int(s["first_segment"])
        for g in self.segments[first : first + int(s["num_segments"])]:
            row = int(g["stream_row"])
            low, high = max(begin, row), min(end, row + int(g["num_rows"]))
            if low < high:
                yield Part(low, int(g["row"]) + low - row, high - low, int(g["peer"]), int(g["slot"]))

    def to_dict(self) -> dict[str, Any]:
        """All fields of all records, as plain integers."""
        result: dict[str, Any] = {
            "header": {name: int(self.header[name]) for name in DTYPES["Header"].names or ()}
        }
        for key in ("queues", "posts", "stages", "streams", "segments", "links"):
            rows = getattr(self, key)
            result[key] = [{n: int(row[n]) for n in rows.dtype.names} for row in rows]
        return result

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def to_text(self) -> str:
        """A dump for people: queues, their stages, and the streams of each."""
        h = self.header
        lines = [
            f"rank {self.rank} of {h['num_ranks']} ({h['servers']} x {h['gpus_per_server']}), "
            f"{POLICIES[int(h['policy'])]}, rows of {h['row_bytes']} bytes: "
            f"{h['input_rows']} in, {h['output_rows']} out"
        ]
        lines += [f"post value {p['value']} to rank {p['rank']} slot {p['slot']}" for p in self.posts]
        for name, queue in zip(QUEUES, self.queues, strict=True):
            if not queue["num_items"]:
                continue
            lines.append(f"{name}: {queue['num_items']} items")
            first = int(queue["first_stage"])
            for k, stage in enumerate(self.stages[first : first + int(queue["num_stages"])]):
                lines.append(
                    f"  stage {k}: ticks {stage['ticks_begin']}-{stage['ticks_end']}, "
                    f"{stage['num_chunks']} chunks"
                )
                at = int(stage["first_stream"])
                for s in self.streams[at : at + int(stage["num_streams"])]:
                    lines.append(_stream_text(name, s))
        return "\n".join(lines)


def _stream_text(queue: str, s: Any) -> str:
    text = (
        f"    {'from' if queue in ('receive', 'land', 'take') else 'to'} rank {s['peer']}: "
        f"{s['num_rows']} rows by {s['chunk_rows']}"
    )
    if s["slot"] != NO_SLOT:
        text += f", slot {s['slot']}"
    if s["gate_slot"] != NO_SLOT:
        text += f", gate {s['gate_slot']} >= {s['gate_value']}"
    if s["credit_slot"] != NO_SLOT:
        text += f", credit to rank {s['credit_rank']} at chunk {s['credit_chunk']}"
    return text
