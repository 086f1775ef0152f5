"""Python's view of a stage table: structured arrays over its bytes, made from its field lists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
AT_CHUNK_END: tuple[int, ...] = tuple(_CONSTANTS["AT_CHUNK_END"])  # 1: planned at a chunk's end
POLICIES: tuple[str, ...] = tuple(_CONSTANTS["POLICIES"])
OPS: tuple[str, ...] = tuple(_CONSTANTS["OPS"])
ARRIVAL_BYTES: int = _CONSTANTS["ARRIVAL_BYTES"]

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype([(field, "<" + kind) for field, kind in fields])
    for name, fields in _core.schema().items()
}


# The arrays after the header, in the order in which they lie in the block.
ARRAYS = {
    "queues": "Queue",
    "posts": "Post",
    "stages": "Stage",
    "streams": "Stream",
    "segments": "Segment",
    "links": "Link",
}


def flag_slots(servers: int, gpus_per_server: int, chunk_slots: int) -> int:
    """64-bit flag words of one rank."""
    return int(_core.flag_slots(servers, gpus_per_server, chunk_slots))


class Item(NamedTuple):
    """One unit of work: a chunk of a stream. `empty`: no rows of this rank in the chunk."""

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
    """Byte offsets of a rank's send staging, receive staging, window and scratch; their sum."""

    send: int
    receive: int
    window: int
    scratch: int
    bytes: int


class StageTable:
    """One rank's stage table.

    bytes: [table_bytes] uint8, as the kernels read it. header: one record. queues, posts, stages,
    streams, segments, links: structured arrays, views of the same bytes.

    Raises ValueError when the bytes are not a table of this version and size.
    """

    __slots__ = ("_records", "_views", "bytes")

    def __init__(self, block: npt.NDArray[np.uint8]) -> None:
        self.bytes = block
        self._views: dict[str, Any] | None = None
        self._records: dict[str, list[dict[str, int]]] = {}

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
        for array, name in ARRAYS.items():
            count = len(QUEUES) if array == "queues" else int(header["num_" + array])
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

    def records(self, array: str) -> list[dict[str, int]]:
        """The records of "queues", "posts", ... as plain integers, read from the bytes once."""
        if array not in self._records:
            rows = getattr(self, array)
            self._records[array] = [
                dict(zip(rows.dtype.names, row, strict=True)) for row in rows.tolist()
            ]
        return self._records[array]

    def items(self, queue: str) -> Iterator[Item]:
        """The items of a queue in order, empty ones included."""
        index = QUEUES.index(queue)
        row = self.records("queues")[index]
        ended = AT_CHUNK_END[QUEUES.index(queue)]
        for k in range(row["num_stages"]):
            stage = self.records("stages")[row["first_stage"] + k]
            begin, end = stage["ticks_begin"], stage["ticks_end"]
            for chunk in range(stage["num_chunks"]):
                ticks = begin + (end - begin) * (chunk + ended) // stage["num_chunks"]
                for x in range(stage["num_streams"]):
                    stream = stage["first_stream"] + x
                    empty = self._is_empty(queue, stream, chunk)
                    yield Item(queue, k, stream, chunk, ticks * 4 + PHASES[index], empty)

    def _is_empty(self, queue: str, stream: int, chunk: int) -> bool:
        begin, end = self.chunk_bounds(stream, chunk)
        if begin == end:
            return True
        # Puts and receives carry the rows of all ranks; of the other queues' chunks a part is ours.
        return queue not in ("put", "receive") and not any(self.parts(stream, chunk))

    @property
    def op(self) -> str:
        """What the table is for: "all_to_all", "dispatch" or "combine"."""
        return OPS[int(self.header["op"])]

    def chunk_bounds(self, stream: int, chunk: int) -> tuple[int, int]:
        """First row of a chunk and the row after its last, counted from the start of the stream."""
        s = self.records("streams")[stream]
        begin = min(chunk * s["chunk_rows"], s["num_rows"])
        return begin, min(begin + s["chunk_rows"], s["num_rows"])

    def parts(self, stream: int, chunk: int) -> Iterator[Part]:
        """The segments of a stream inside a chunk, cut to it."""
        s = self.records("streams")[stream]
        begin, end = self.chunk_bounds(stream, chunk)
        first = s["first_segment"]
        for g in self.records("segments")[first : first + s["num_segments"]]:
            row = g["stream_row"]
            low, high = max(begin, row), min(end, row + g["num_rows"])
            if low < high:
                yield Part(low, g["row"] + low - row, high - low, g["peer"], g["slot"])

    def to_dict(self) -> dict[str, Any]:
        """All fields of all records, as plain integers."""
        header = {name: int(self.header[name]) for name in DTYPES["Header"].names or ()}
        return {"header": header} | {array: self.records(array) for array in ARRAYS}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> StageTable:
        """The table that `to_dict` or `to_json` dumped, byte for byte.

        content: what `to_dict` gave, or `json.loads` of what `to_json` gave. Raises KeyError for a
        missing field.
        """

        def pack(record: str, rows: list[dict[str, int]]) -> npt.NDArray[np.uint8]:
            names = DTYPES[record].names or ()
            values = [tuple(row[name] for name in names) for row in rows]
            return np.array(values, dtype=DTYPES[record]).view(np.uint8)

        blocks = [pack("Header", [content["header"]])]
        blocks += [pack(record, content[array]) for array, record in ARRAYS.items()]
        return cls(np.concatenate(blocks))

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def to_text(self) -> str:
        """A dump for people: queues, their stages, and the streams of each."""
        h = self.header
        lines = [
            f"rank {self.rank} of {h['num_ranks']} ({h['servers']} x {h['gpus_per_server']}), "
            f"{self.op}, {POLICIES[int(h['policy'])]}, rows of {h['row_bytes']} bytes: "
            f"{h['input_rows']} in, {h['output_rows']} out"
        ]
        lines += [
            f"post value {p['value']} to rank {p['rank']} slot {p['slot']}" for p in self.posts
        ]
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
        f"    {'from' if queue in ('receive', 'land', 'take', 'sum') else 'to'} rank {s['peer']}: "
        f"{s['num_rows']} rows by {s['chunk_rows']}"
    )
    if s["slot"] != NO_SLOT:
        text += f", slot {s['slot']}"
    if s["gate_slot"] != NO_SLOT:
        text += f", gate {s['gate_slot']} >= {s['gate_value']}"
    if s["credit_slot"] != NO_SLOT:
        text += f", credit to rank {s['credit_rank']} at chunk {s['credit_chunk']}"
    return text
