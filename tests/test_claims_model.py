"""perf/claims.py: what its model must show."""

from __future__ import annotations

import pytest

from perf.claims import LOOKS, NUM_ITEMS, SWAP_US, Looks, simulate


@pytest.mark.parametrize("looks", LOOKS, ids=lambda looks: looks.name)
def test_a_block_alone_loses_nothing(looks: Looks) -> None:
    time_us = simulate(1, 20, looks) / NUM_ITEMS
    assert time_us == pytest.approx(20 + looks.look_us, rel=0.02)


def test_who_looks_again_claims_one_item_in_a_look() -> None:
    again = Looks("", 10, 0, 0)
    for num_blocks in (16, 64):
        assert 9 <= simulate(num_blocks, 5, again) / NUM_ITEMS <= 11


def test_who_goes_on_is_bound_by_swaps() -> None:
    on = Looks("", 10, 3, 8)
    assert SWAP_US <= simulate(64, 5, on) / NUM_ITEMS <= 1.3 * SWAP_US
