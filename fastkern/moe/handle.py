"""The handle of a dispatch: a view of its metadata tensor, which owns all that it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import _host
from . import device_blocks

MAGIC: int = _host.moe_constants["HANDLE_MAGIC"]
NONE: int = _host.moe_constants["NONE"]
MOST_CHOICES: int = _host.moe_constants["MOST_CHOICES"]  # top-k
MOST_PARTS: int = _host.moe_constants["MOST_PARTS"]
ENTRY_BYTES: int = _host.moe_constants["ENTRY_BYTES"]
LAYOUTS = ("expert", "rank")
HEADER: np.dtype[Any] = np.dtype([(name, "<" + kind) for name, kind in _host.handle_schema()])

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class MetaInfo:
    """What a handle's header says; counts of this rank.

    num_recv_rows: rows of recv_x, padding included. window_rows: distinct tokens that it got.
    """

    serial: int
    rank: int
    num_ranks: int
    servers: int
    num_tokens: int
    topk: int
    num_experts: int
    num_own_experts: int
    layout: str
    num_recv_rows: int
    window_rows: int
    alignment: int
    num_max_tokens: int | None


@dataclass(frozen=True)
class DispatchStats:
    """What a dispatch moves from this rank; bytes include headers, weights and alignment.

    scale_out_rows: over scale-out; summed over ranks, the number of distinct pairs of a token and a
    remote server. packed_rows: to proxies of this server, for balance. pushed_rows: to ranks of
    this server that have experts of this rank's tokens. handed_on_rows: as a proxy, to ranks of
    this server. The combine moves as many rows the other way.
    """

    row_bytes: int
    scale_out_rows: int
    packed_rows: int
    pushed_rows: int
    handed_on_rows: int

    @property
    def scale_up_rows(self) -> int:
        """Rows to other ranks of the same server."""
        return self.packed_rows + self.pushed_rows + self.handed_on_rows

    @property
    def scale_out_bytes(self) -> int:
        """Bytes over scale-out."""
        return self.scale_out_rows * self.row_bytes

    @property
    def scale_up_bytes(self) -> int:
        """Bytes to other ranks of the same server."""
        return self.scale_up_rows * self.row_bytes


def raw_bytes(meta: torch.Tensor) -> Bytes:
    """The metadata as bytes; raises ValueError when it is no handle's."""
    if meta.dtype != torch.int64 or meta.dim() != 1 or not meta.is_contiguous():
        raise ValueError("handle: its metadata must be a contiguous int64 vector")
    raw: Bytes = meta.detach().numpy().view(np.uint8)
    if len(raw) < HEADER.itemsize or int(raw[: HEADER.itemsize].view(HEADER)[0]["magic"]) != MAGIC:
        raise ValueError("handle: not the metadata of a dispatch")
    whole = int(raw[: HEADER.itemsize].view(HEADER)[0]["handle_bytes"])
    if len(raw) != whole:
        raise ValueError(f"handle: its metadata has {len(raw)} bytes, not {whole}")
    return raw


def header_of(meta: torch.Tensor) -> Any:
    """The header, a record that writes through to `meta`."""
    return raw_bytes(meta)[: HEADER.itemsize].view(HEADER)[0]


def meta_info(meta: torch.Tensor) -> MetaInfo:
    """What the header says."""
    h = header_of(meta)
    return MetaInfo(
        serial=int(h["serial"]),
        rank=int(h["rank"]),
        num_ranks=int(h["num_ranks"]),
        servers=int(h["servers"]),
        num_tokens=int(h["num_tokens"]),
        topk=int(h["topk"]),
        num_experts=int(h["num_experts"]),
        num_own_experts=int(h["num_own_experts"]),
        layout=LAYOUTS[int(h["layout"])],
        num_recv_rows=int(h["num_recv_rows"]),
        window_rows=int(h["window_rows"]),
        alignment=int(h["alignment"]),
        num_max_tokens=int(h["num_max_tokens"]) or None,
    )


def array_of(meta: torch.Tensor, name: str, dtype: Any, count: int) -> npt.NDArray[Any]:
    """One of the header's arrays, see kernels/body/handle.h."""
    raw = raw_bytes(meta)
    begin = int(_host.handle_layout(raw)[name])
    kind = np.dtype(dtype)
    return raw[begin : begin + count * kind.itemsize].view(kind)


def tokens_per_expert(meta: torch.Tensor) -> torch.Tensor:
    """int64 [own experts]: slots of each expert here, without padding."""
    counts = array_of(meta, "tokens_per_expert", np.int64, meta_info(meta).num_own_experts)
    return torch.from_numpy(counts.copy())


def block_of(meta: torch.Tensor) -> torch.Tensor | None:
    """uint8 [handle_bytes]: the whole handle, where it is on a device; the metadata then holds its
    header and counts. None: there is none, or it is gone."""
    h = header_of(meta)
    return device_blocks.find((int(h["communicator"]), int(h["serial"])))


def num_partials(meta: torch.Tensor) -> int:
    """Partial rows that this rank gave out as a proxy; waits for a device."""
    block = block_of(meta)
    if block is None:
        return int(header_of(meta)["num_partials"])
    fields: Any = HEADER.fields
    offset = int(fields["num_partials"][1])
    return int(block[offset : offset + 8].cpu().view(torch.int64))


def padding_spans(meta: torch.Tensor) -> list[tuple[int, int]]:
    """Rows of recv_x that a dispatch does not write, as (first, end) with first < end."""
    info = meta_info(meta)
    spans, begin = [], 0
    if info.layout == "expert":
        for count in tokens_per_expert(meta).tolist():
            padded = -(-count // info.alignment) * info.alignment
            spans.append((begin + count, begin + padded))
            begin += padded
    else:
        begin = info.window_rows
    spans.append((begin, info.num_recv_rows))
    return [(first, end) for first, end in spans if first < end]


def slot_choice(meta: torch.Tensor) -> torch.Tensor:
    """int64 [num_recv_rows], expert layout: which choice (0..K-1) each row is; -1: padding."""
    info = meta_info(meta)
    if info.layout != "expert":
        raise ValueError("slot_choice: rows of the rank layout hold all choices of a token")
    if (block := block_of(meta)) is not None:
        return _slot_choice_on_device(meta, info, block)
    slots = array_of(meta, "window_slots", np.uint32, info.window_rows * info.topk)
    filled = np.flatnonzero(slots != NONE)
    choice = np.full(info.num_recv_rows, -1, dtype=np.int64)
    choice[slots[filled]] = filled % max(info.topk, 1)
    return torch.from_numpy(choice)


def _slot_choice_on_device(meta: torch.Tensor, info: MetaInfo, block: torch.Tensor) -> torch.Tensor:
    """The same where the handle is, without waiting for it."""
    begin = int(_host.handle_layout(raw_bytes(meta))["window_slots"])
    count = info.window_rows * info.topk
    words = block[begin : begin + 4 * count].view(torch.int32).long() & 0xFFFFFFFF
    rows = torch.where(words == NONE, info.num_recv_rows, words)  # one row more, for none
    choice = words.new_full((info.num_recv_rows + 1,), -1)
    places = torch.arange(count, device=block.device)
    choice[rows] = places % max(info.topk, 1)
    return choice[:-1]


class Handle:
    """What combine, backward and later calls with the same routing need of a dispatch.

    meta: int64 vector that owns all metadata, `nbytes` bytes: about 12 * K bytes for each row sent,
    4 * (N + M) for each token, 4 * K for each distinct token received, 4 * M for each row proxied
    (exactly: kernels/body/handle.h). It lives as long as the tensor does, whatever other calls do;
    it is of use with the communicator that made it. On a GPU it is still a CPU tensor, with header
    and counts, and keeps the rest on the device alive; a copy of it does not. recv_topk_idx: rank
    layout: int64 [num_recv_rows, K], the chosen expert's index on this rank or -1; expert layout:
    None. anchor: float32 [num_recv_rows, T, 0], no elements: what ties a combine to its dispatch in
    autograd's graph. host_counts: False hides tokens_per_expert_list.
    """

    def __init__(
        self,
        meta: torch.Tensor,
        recv_topk_idx: torch.Tensor | None = None,
        host_counts: bool = True,
    ) -> None:
        # No more than this: compilers trace it, and have no values to look at.
        self.meta = meta
        self.recv_topk_idx = recv_topk_idx
        self.host_counts = host_counts
        self.anchor: torch.Tensor | None = None

    @property
    def info(self) -> MetaInfo:
        """What its header says."""
        return meta_info(self.meta)

    num_tokens = property(lambda self: self.info.num_tokens, doc="Tokens of this rank, T.")
    topk = property(lambda self: self.info.topk, doc="Choices of a token, K.")
    num_experts = property(lambda self: self.info.num_experts, doc="Experts of all ranks, E.")
    num_recv_rows = property(lambda self: self.info.num_recv_rows, doc="Rows of recv_x.")

    layout = property(lambda self: self.info.layout, doc='"expert" or "rank".')

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """int64 [own experts]: slots of each expert here, without padding."""
        return tokens_per_expert(self.meta)

    @property
    def tokens_per_expert_list(self) -> list[int] | None:
        """The same on the host; None after host_counts=False."""
        if not self.host_counts:
            return None
        return [int(k) for k in tokens_per_expert(self.meta)]

    @property
    def nbytes(self) -> int:
        """Bytes of the metadata."""
        return self.meta.numel() * self.meta.element_size()

    @property
    def stats(self) -> DispatchStats:
        """Rows and bytes that the dispatch moves from this rank."""
        h, info = header_of(self.meta), self.info
        m, r = info.num_ranks // info.servers, info.num_ranks
        to_rank = array_of(self.meta, "to_rank", np.int64, r * r).reshape(r, r)[info.rank]
        first = info.rank // m * m
        return DispatchStats(
            row_bytes=int(h["plan_row_bytes"]),
            scale_out_rows=int(h["sent_rows"]),
            packed_rows=int(h["packed_rows"]),
            pushed_rows=int(to_rank[first : first + m].sum() - to_rank[info.rank]),
            handed_on_rows=num_partials(self.meta),
        )

    @property
    def released(self) -> bool:
        """Whether `release` has been called."""
        return bool(header_of(self.meta)["released"])

    def release(self) -> None:
        """Have every later use of it refused. Not needed: it goes with its tensor."""
        header_of(self.meta)["released"] = 1

    def __repr__(self) -> str:
        i = self.info
        return (
            f"Handle(call {i.serial}, {i.num_tokens} tokens, top {i.topk} of {i.num_experts} "
            f"experts, {i.num_recv_rows} rows received, {i.layout} layout, {self.nbytes} bytes)"
        )
