"""The record each rank writes into every rank's heap when it enters a call.

It is the call's entry word and its count exchange at once: operation, what the ranks must agree on,
counts, and what was wrong with this rank's own arguments. Every rank reads the same records and
comes to the same verdict, so an error is raised on all of them before any byte moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .tensors import RowCall

Words = npt.NDArray[np.uint64]

OP_ALL_TO_ALL = 1
OP_RESERVE = 2
OP_DISPATCH = 3
OP_COMBINE = 4
OP_COUNTS = 5  # a further page of a dispatch's counts
OP_STATIC = 6
_OP_NAMES = {
    OP_ALL_TO_ALL: "all_to_all_single",
    OP_RESERVE: "reserve",
    OP_DISPATCH: "dispatch",
    OP_COMBINE: "combine",
    OP_COUNTS: "dispatch",
    OP_STATIC: "static_exchange",
}

# Words: op, status, text bytes, row bytes, dtype name (4), text (64), body: of an all-to-all input
# splits [R] and output splits [R]; of others what they say.
_OP, _STATUS, _TEXT_BYTES, _ROW_BYTES, _DTYPE, _TEXT = 0, 1, 2, 3, 4, 8
_DTYPE_BYTES = 32
_TEXT_WORDS = 64
BODY = _TEXT + _TEXT_WORDS
MOST_BODY_WORDS = 1024
_STATUS_TYPES: tuple[type[Exception], ...] = (
    Exception,  # 0: nothing wrong
    ValueError,
    TypeError,
    MemoryError,
    RuntimeError,
)
_NO_ROWS = (1 << 64) - 1  # row bytes of a rank that has none to measure


def record_words(num_ranks: int) -> int:
    """64-bit words of the longest record."""
    return BODY + max(2 * num_ranks, MOST_BODY_WORDS)


def encode(op: int, call: RowCall | Exception | int, num_ranks: int) -> Words:
    """This rank's record: a checked call, the error of its arguments, or a size in bytes."""
    words: Words = np.zeros(BODY + 2 * num_ranks, dtype=np.uint64)
    words[_OP] = op
    if isinstance(call, Exception):
        _write_error(words, call)
    elif isinstance(call, int):
        words[_ROW_BYTES] = call
    else:
        words[_ROW_BYTES] = _NO_ROWS if call.row_bytes is None else call.row_bytes
        _write_dtype(words, call.dtype)
        words[BODY : BODY + num_ranks] = call.input_splits
        words[BODY + num_ranks :] = call.output_splits
    return words


def encode_call(op: int, agreement: str | Exception, dtypes: str, body: Words) -> Words:
    """The record of a call whose ranks must agree on a text; body: words of their own.

    An error's body does not count, but the record is as long as that of a good call.
    """
    words: Words = np.zeros(BODY + len(body), dtype=np.uint64)
    words[_OP] = op
    if isinstance(agreement, Exception):
        _write_error(words, agreement)
        return words
    _write_dtype(words, dtypes)
    text = agreement.encode()
    words[_ROW_BYTES] = _hash(text)
    _write_text(words, text)
    words[BODY:] = body
    return words


def verdict(records: Words) -> npt.NDArray[np.int64]:
    """The traffic matrix [R, R] of records [R, words], or the error that all ranks raise."""
    num_ranks = len(records)
    op = _agree_on_op(records)
    _agree_on_dtypes(records, op)
    known = np.flatnonzero(records[:, _ROW_BYTES] != np.uint64(_NO_ROWS))
    if (records[known, _ROW_BYTES] != records[known[:1], _ROW_BYTES]).any():
        widths = [f"{int(k)} bytes" for k in records[known, _ROW_BYTES]]
        what = "sizes" if int(records[0, _OP]) == OP_RESERVE else "row widths"
        raise ValueError(f"{op}: {what} differ between ranks: {_by_value(widths, known.tolist())}")
    sent = records[:, BODY : BODY + num_ranks]
    expected = records[:, BODY + num_ranks : BODY + 2 * num_ranks].T
    if (sent != expected).any():
        places = np.argwhere(sent != expected)
        shown = "; ".join(
            f"src {s}, dst {d}: sent {int(sent[s, d])}, expected {int(expected[s, d])}"
            for s, d in places[:8]
        )
        more = f"; and {len(places) - 8} more" if len(places) > 8 else ""
        raise ValueError(f"{op}: splits disagree between ranks: {shown}{more}")
    return np.ascontiguousarray(sent).view(np.int64)


def agreed_bodies(records: Words) -> Words:
    """The bodies [R, words] of records made by `encode_call`, or the error that all ranks raise."""
    op = _agree_on_op(records)
    _agree_on_dtypes(records, op)
    if (records[:, _ROW_BYTES] != records[0, _ROW_BYTES]).any():
        texts = [_text(row) for row in records]
        raise ValueError(f"{op}: arguments differ between ranks: {_by_value(texts)}")
    return records[:, BODY:]


def row_bytes(records: Words) -> int:
    """Bytes of a row, once `verdict` has found them equal; 0 where no rank has rows."""
    known = [int(k) for k in records[:, _ROW_BYTES] if int(k) != _NO_ROWS]
    return known[0] if known else 0


def _agree_on_op(records: Words) -> str:
    """The operation's name; raises what a rank found wrong with its arguments."""
    op = _OP_NAMES[int(records[0, _OP])]
    bad = [rank for rank in range(len(records)) if records[rank, _STATUS]]
    if bad:
        kind = _STATUS_TYPES[int(records[bad[0], _STATUS])]
        ops = {_OP_NAMES[int(records[rank, _OP])] for rank in bad}
        name = op if op in ops else min(ops)
        raise kind(f"{name}: " + _by_value([_text(records[rank]) for rank in bad], bad))
    if (records[:, _OP] != records[0, _OP]).any():
        names = [_OP_NAMES[int(k)] for k in records[:, _OP]]
        raise ValueError(f"ranks called different operations: {_by_value(names)}")
    return op


def _agree_on_dtypes(records: Words, op: str) -> None:
    dtypes = records[:, _DTYPE:_TEXT]
    if (dtypes != dtypes[0]).any():
        names = [_bytes(row).decode() for row in dtypes]
        raise TypeError(f"{op}: dtypes differ between ranks: {_by_value(names)}")


def _write_error(words: Words, error: Exception) -> None:
    kinds = [k for k, kind in enumerate(_STATUS_TYPES) if k and isinstance(error, kind)]
    words[_STATUS] = kinds[0] if kinds else len(_STATUS_TYPES) - 1
    _write_text(words, str(error).encode())


def _write_dtype(words: Words, name: str) -> None:
    raw = name.encode()[:_DTYPE_BYTES]
    words[_DTYPE:_TEXT].view(np.uint8)[: len(raw)] = list(raw)


def _write_text(words: Words, text: bytes) -> None:
    text = text[: 8 * _TEXT_WORDS]
    words[_TEXT_BYTES] = len(text)
    words[_TEXT:BODY].view(np.uint8)[: len(text)] = list(text)


def _text(record: Words) -> str:
    return _bytes(record[_TEXT:BODY])[: int(record[_TEXT_BYTES])].decode(errors="replace")


def _hash(text: bytes) -> int:
    value = 1469598103934665603  # FNV-1a
    for byte in text:
        value = (value ^ byte) * 1099511628211 & _NO_ROWS
    return value


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
