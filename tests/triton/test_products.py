"""F11: row * stride past 2^31, with stride 2^30 and rows 0 to 3, and 2048 around row 2^20."""

from __future__ import annotations

import pytest

from tests.triton import product_cases as cases
from tests.triton.interpreted import Interpreter


@pytest.mark.parametrize("case", [0, 1])
def test_products_are_64_bits_wide(interpreter: Interpreter, case: int) -> None:
    found, right, moved = interpreter.run(cases.run, case)
    assert found == right
    assert moved


def test_products_of_32_bits_wrap_here_too(interpreter: Interpreter) -> None:
    """So the test above can fail: the interpreter computes as a GPU does."""
    assert interpreter.run(cases.narrow_products) == [0, 1 << 30, -(1 << 31), -(1 << 30)]
