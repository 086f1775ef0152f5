"""Calls in rounds: every row moves in exactly one round, to its place in the whole call."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern import rounds
from tests.reference import random_inputs, random_traffic, reference_all_to_all


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 1 << 30))
def test_rounds_together_are_the_call(
    servers: int, per_server: int, num_rounds: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    traffic = random_traffic(servers, per_server, rng, max_rows=12)
    inputs = random_inputs(traffic, 3, rng)
    num_ranks = len(traffic)
    outputs = [
        torch.full((int(traffic[:, r].sum()), 3), 0xEE, dtype=torch.uint8) for r in range(num_ranks)
    ]
    moved = np.zeros_like(traffic)
    for part in rounds.cut(traffic, num_rounds):
        assert (part.first == moved).all()
        assert part.rows.any()
        moved += part.rows
        pieces = [
            rounds.gather(torch.from_numpy(inputs[r]), r, traffic, part).numpy()
            for r in range(num_ranks)
        ]
        for r, received in enumerate(reference_all_to_all(part.rows, pieces)):
            rounds.scatter(outputs[r], torch.from_numpy(received), r, traffic, part)
    assert (moved == traffic).all()
    for output, expected in zip(outputs, reference_all_to_all(traffic, inputs), strict=True):
        assert np.array_equal(output.numpy(), expected)


def test_shares_differ_by_one_row_at_most_even_near_2_to_the_63() -> None:
    traffic = np.array([[0, (1 << 63) - 1], [10, 0]])
    parts = list(rounds.cut(traffic, 4))
    assert [int(p.rows[1, 0]) for p in parts] == [3, 3, 2, 2]
    assert sum(int(p.rows[0, 1]) for p in parts) == (1 << 63) - 1
