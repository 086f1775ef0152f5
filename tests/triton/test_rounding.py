"""Reading and rounding of 16-bit floats in Triton against kernels/body/number.h, bit for bit.

All 2^16 patterns; each tie between two neighbours and the floats next to it; random bits; NaNs of
every payload come out as the C++ ones do. tests/test_number.py holds those to PyTorch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkern.moe.tensor_checks import VALUE_KINDS
from tests.test_number import (
    SPECIAL,
    Convert,
    Floats,
    all_patterns,
    compile_converter,
    random_floats,
    ties,
)
from tests.triton import rounding_cases as cases
from tests.triton.interpreted import Interpreter

NAMES = ("bfloat16", "float16")


@pytest.fixture(scope="module")
def in_cxx(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    return compile_converter(tmp_path_factory.mktemp("number"))


def test_kinds_are_those_of_the_calls(interpreter: Interpreter) -> None:
    numbers = {str(dtype).removeprefix("torch."): kind for dtype, kind in VALUE_KINDS.items()}
    assert interpreter.run(cases.kinds) == numbers
    assert numbers["bfloat16"] == VALUE_KINDS[torch.bfloat16]


def test_sums_start_at_minus_zero(interpreter: Interpreter) -> None:
    assert interpreter.run(cases.sums_at_start) == ([1 << 31] * 4, [1 << 63] * 4)


@pytest.mark.parametrize("name", NAMES)
def test_every_pattern_is_read(interpreter: Interpreter, in_cxx: Convert, name: str) -> None:
    values = all_patterns().tobytes()
    expected = in_cxx(name, "widen", values)
    for wide in (False, True):
        assert interpreter.run(cases.convert, name, "widen", values, wide) == expected


def floats(name: str) -> Floats:
    """Every kind of value, of odd number."""
    bits = np.array([int(word, 16) for word in SPECIAL.split()], dtype=np.uint32)
    special = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    drawn = np.concatenate([special, ties(name), random_floats()])
    result: Floats = drawn[: len(drawn) // 2 * 2 - 1]
    return result


@pytest.mark.parametrize("name", NAMES)
def test_floats_are_rounded(interpreter: Interpreter, in_cxx: Convert, name: str) -> None:
    values = floats(name)
    expected = np.frombuffer(in_cxx(name, "round", values.tobytes()), dtype=np.uint16)
    got = interpreter.run(cases.convert, name, "round", values.tobytes(), False)
    wrong = np.flatnonzero(np.frombuffer(got, dtype=np.uint16) != expected)
    assert len(wrong) == 0, [hex(values.view(np.uint32)[k]) for k in wrong[:5]]
    assert np.isnan(values).sum() > 1000
