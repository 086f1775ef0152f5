"""Handles on devices: the metadata tensor on the CPU keeps the handle's memory on the device alive.

The tensor is made of a NumPy array, which it keeps as long as its storage lives, and the array
holds the device's memory. The way back, from a tensor that may be another view of that storage or
have been saved for a backward, goes by the header: communicator and serial.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from .handle import header_of
from .make_handle import HandleForm


class _Backed(np.ndarray[Any, Any]):
    """An array that keeps a tensor alive."""

    block: torch.Tensor | None = None


_blocks: weakref.WeakValueDictionary[tuple[int, int], _Backed] = weakref.WeakValueDictionary()


def new_meta(form: HandleForm, block: torch.Tensor) -> torch.Tensor:
    """Metadata int64 [form.num_bytes / 8] that keeps `block` alive: header and counts, then zeros,
    since the rest is on the device alone."""
    array = np.zeros(form.num_bytes // 8, dtype=np.int64).view(_Backed)
    array.block = block
    meta = torch.from_numpy(array)
    form.write_start(meta)
    _blocks[_key(meta)] = array
    return meta


def block_of(meta: torch.Tensor) -> torch.Tensor | None:
    """uint8: the handle on the device; None where there is none, or it is gone."""
    found = _blocks.get(_key(meta))
    return None if found is None else found.block


def _key(meta: torch.Tensor) -> tuple[int, int]:
    header = header_of(meta)
    return int(header["communicator"]), int(header["serial"])
