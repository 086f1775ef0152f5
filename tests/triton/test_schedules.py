"""Kernels in Triton whose flags come late: random delays before releases, claims and looks.

In the interpreter functions of the kernels are Python's, so a delayed one can take their place.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import SharedPools
from tests.device.communicator_cases import call_once
from tests.processes import RanksFailed
from tests.reference import random_traffic
from tests.triton.communicators import triton_communicator

MOST_DELAY_S = 0.01


def delayed(call: Callable[..., Any], rng: random.Random, share: float) -> Callable[..., Any]:
    """The same, late in a share of all cases."""

    def later(*args: Any) -> Any:
        if rng.random() < share:
            time.sleep(rng.random() * MOST_DELAY_S)
        return call(*args)

    return later


def shuffled(rank: int, ranks: int, seed: int, gates_hold: bool) -> None:
    """Calls back to back, other rows in each; ranks come to each at other times."""
    from fastkern.kernels.triton import call, items, persistent, pick

    rng, data = random.Random(100 * seed + rank), np.random.default_rng(seed)
    patched: list[tuple[Any, str, Any]] = [
        (call, "store_release", delayed(call.store_release, rng, 0.3)),
        (persistent, "take", delayed(persistent.take, rng, 0.3)),
        (persistent, "look", delayed(persistent.look, rng, 0.2)),
    ]
    if not gates_hold:  # whatever an item waits for, it runs
        patched.append((pick, "can_run", lambda call, item: items.look(call).aborted * 0 + 1))
    before = [(module, name, getattr(module, name)) for module, name, _ in patched]
    try:
        for module, name, new in patched:
            setattr(module, name, new)
        policies = ("whole", "direct") if gates_hold else ("whole",)
        for policy in policies:
            options: dict[str, Any] = {"policy": policy, "num_blocks": 2, "chunk_bytes": 64}
            if not gates_hold:  # nobody waits long for those that have seen it
                options |= {"entry_timeout_s": 2.0, "progress_timeout_s": 2.0}
            with triton_communicator(2, **options) as comm:
                for k in range(2 if policy == "whole" else 1):
                    time.sleep(rng.random() * 0.05)
                    traffic = random_traffic(2, ranks // 2, data, 6, "")
                    call_once(comm, traffic, torch.int16, k, "plain")
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def test_late_flags_change_nothing(interpreting_pools: SharedPools) -> None:
    """F12, F13: ready, credit and pack flags come late, and ranks are calls apart."""
    interpreting_pools.pool(4).run(shuffled, 1, True, timeout_s=150)


def emptied(rank: int, ranks: int) -> list[int]:
    """How many items without rows each look has found before the first with rows."""
    from fastkern.kernels.triton import persistent

    found: list[int] = []
    real = persistent.look

    def look(call: Any) -> Any:
        heads = real(call)
        found.extend(heads.empty.handle.data.tolist())
        return heads

    persistent.look = look
    try:
        options: dict[str, Any] = {"policy": "direct", "num_blocks": 1, "chunk_bytes": 8}
        with triton_communicator(1, **options) as comm:
            traffic = np.array([[0, 30, 1], [1, 0, 0], [0, 0, 1]])
            call_once(comm, traffic, torch.int64, 1, "plain")
    finally:
        persistent.look = real
    return found


def test_items_without_rows_are_passed_at_once(interpreting_pools: SharedPools) -> None:
    """A stream of many chunks beside others of few: their places are passed by runs."""
    for found in interpreting_pools.pool(3).run(emptied, timeout_s=100):
        assert max(found) > 1


def test_waits_are_needed(interpreting_pools: SharedPools) -> None:
    """The control: items that do not wait move rows that are not there yet."""
    with pytest.raises(RanksFailed, match="AssertionError"):
        interpreting_pools.pool(4).run(shuffled, 1, False, timeout_s=150)
