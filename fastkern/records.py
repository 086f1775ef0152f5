"""The record each rank writes into every rank's heap when it enters a call.

It is the call's entry word and its count exchange at once: operation, dtype, row width, splits both
ways, and what was wrong with this rank's own arguments. Every rank reads the same records and comes
to the same verdict, so an error is raised on all of them before any byte moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .tensors import RowCall

Words = npt.NDArray[np.uint64]

OP_ALL_TO_ALL = 1
OP_RESERVE = 2
_OP_NAMES = {OP_ALL_TO_ALL: "all_to_all_single", OP_RESERVE: "reserve"}

# Words: op, status, text bytes, row bytes, dtype name (4), input splits [R], output splits [R],
# text (64).
_OP, _STATUS, _TEXT_BYTES, _ROW_BYTES, _DTYPE, _SPLITS = 0, 1, 2, 3, 4, 8
_DTYPE_BYTES = 32
_TEXT_WORDS = 64
_STATUS_TYPES: tuple[type[Exception], ...] = (
    Exception,  # 0: nothing wrong
    ValueError,
    TypeError,
    MemoryError,
    RuntimeError,
)
_NO_ROWS = (1 << 64) - 1  # row bytes of a rank that has none to measure


def record_words(num_ranks: int) -> int:
    """64-bit words of one record."""
    return _SPLITS + 2 * num_ranks + _TEXT_WORDS


def encode(op: int, call: RowCall | Exception | int, num_ranks: int) -> Words:
    """This rank's record: a checked call, the error of its arguments, or a size in bytes."""
    words: Words = np.zeros(record_words(num_ranks), dtype=np.uint64)
    words[_OP] = op
    if isinstance(call, Exception):
        kinds = [k for k, kind in enumerate(_STATUS_TYPES) if k and isinstance(call, kind)]
        words[_STATUS] = kinds[0] if kinds else len(_STATUS_TYPES) - 1
        text = str(call).encode()[: 8 * _TEXT_WORDS]
        words[_TEXT_BYTES] = len(text)
        words[_SPLITS + 2 * num_ranks :].view(np.uint8)[: len(text)] = list(text)
        return words
    if isinstance(call, int):
        words[_ROW_BYTES] = call
        return words
    words[_ROW_BYTES] = _NO_ROWS if call.row_bytes is None else call.row_bytes
    name = call.dtype.encode()[:_DTYPE_BYTES]
    words[_DTYPE:_SPLITS].view(np.uint8)[: len(name)] = list(name)
    words[_SPLITS : _SPLITS + num_ranks] = call.input_splits
    words[_SPLITS + num_ranks : _SPLITS + 2 * num_ranks] = call.output_splits
    return words


def verdict(records: Words) -> npt.NDArray[np.int64]:
    """The traffic matrix [R, R] of records [R, words], or the error that all ranks raise."""
    num_ranks = len(records)
    op = _OP_NAMES[int(records[0, _OP])]
    _refuse_own_errors(records, op)
    if (records[:, _OP] != records[0, _OP]).any():
        names = [_OP_NAMES[int(k)] for k in records[:, _OP]]
        raise ValueError(f"ranks called different operations: {_by_value(names)}")
    if (records[:, _DTYPE:_SPLITS] != records[0, _DTYPE:_SPLITS]).any():
        names = [_bytes(row[_DTYPE:_SPLITS]).decode() for row in records]
        raise TypeError(f"{op}: dtypes differ between ranks: {_by_value(names)}")
    known = np.flatnonzero(records[:, _ROW_BYTES] != np.uint64(_NO_ROWS))
    if (records[known, _ROW_BYTES] != records[known[:1], _ROW_BYTES]).any():
        widths = [f"{int(k)} bytes" for k in records[known, _ROW_BYTES]]
        what = "sizes" if int(records[0, _OP]) == OP_RESERVE else "row widths"
        raise ValueError(f"{op}: {what} differ between ranks: {_by_value(widths, known.tolist())}")
    sent = records[:, _SPLITS : _SPLITS + num_ranks]
    expected = records[:, _SPLITS + num_ranks : _SPLITS + 2 * num_ranks].T
    if (sent != expected).any():
        places = np.argwhere(sent != expected)
        shown = "; ".join(
            f"src {s}, dst {d}: sent {int(sent[s, d])}, expected {int(expected[s, d])}"
            for s, d in places[:8]
        )
        more = f"; and {len(places) - 8} more" if len(places) > 8 else ""
        raise ValueError(f"{op}: splits disagree between ranks: {shown}{more}")
    return np.ascontiguousarray(sent).view(np.int64)


def row_bytes(records: Words) -> int:
    """Bytes of a row, once `verdict` has found them equal; 0 where no rank has rows."""
    known = [int(k) for k in records[:, _ROW_BYTES] if int(k) != _NO_ROWS]
    return known[0] if known else 0


def _refuse_own_errors(records: Words, op: str) -> None:
    bad = [rank for rank in range(len(records)) if records[rank, _STATUS]]
    if not bad:
        return
    texts = []
    for rank in bad:
        row = records[rank]
        raw = _bytes(row[-_TEXT_WORDS:])[: int(row[_TEXT_BYTES])]
        texts.append(raw.decode(errors="replace"))
    kind = _STATUS_TYPES[int(records[bad[0], _STATUS])]
    raise kind(f"{op}: " + _by_value(texts, bad))


def _bytes(words: Words) -> bytes:
    return np.ascontiguousarray(words).tobytes().rstrip(b"\0")


def _by_value(values: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """'rank 0: int64; ranks 1, 2, 3: float64'."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        groups.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {value}"
        for value, who in groups.items()
    )
