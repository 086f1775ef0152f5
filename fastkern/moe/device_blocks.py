"""Handles on devices: the metadata tensor on the CPU keeps the handle's memory on the device alive.

The tensor is made of a NumPy array, which it keeps as long as its storage lives, and the array
holds the device's memory. The way back, from a tensor that may be another view of that storage or
have been saved for a backward, goes by what the header says: communicator and serial.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

Key = tuple[int, int]  # communicator's tag, serial


class _Backed(np.ndarray[Any, Any]):
    """An array that keeps a tensor alive."""

    block: torch.Tensor | None = None


_blocks: weakref.WeakValueDictionary[Key, _Backed] = weakref.WeakValueDictionary()


def keeping(key: Key, num_words: int, block: torch.Tensor) -> torch.Tensor:
    """int64 [num_words], zero, which keeps `block` alive for `find`."""
    array = np.zeros(num_words, dtype=np.int64).view(_Backed)
    array.block = block
    _blocks[key] = array
    return torch.from_numpy(array)


def find(key: Key) -> torch.Tensor | None:
    """What is kept for this key; None where nothing is, or it is gone."""
    found = _blocks.get(key)
    return None if found is None else found.block
