"""Values of expert outputs, and their sums: float32, or float64 for float64 values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]

# How each kind is held: NumPy has no bfloat16, so its bits are.
DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}


def sum_dtype(kind: str) -> np.dtype[Any]:
    """Of sums of values of this kind, and of their weights."""
    return np.dtype(np.float64 if kind == "float64" else np.float32)


def widen(values: Values, kind: str, to: np.dtype[Any]) -> Values:
    """The values as numbers of a sum; exact."""
    if kind == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(to)
    return values.astype(to)


def narrow(sums: Values, kind: str) -> Values:
    """The sums in a kind: to the nearest, ties to even. A bfloat16 NaN is 0x7fc0."""
    if kind != "bfloat16":
        with np.errstate(over="ignore"):
            return sums.astype(DTYPES[kind])
    bits = sums.astype(np.float32).view(np.uint32)
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    return np.where(np.isnan(sums), 0x7FC0, high + up).astype(np.uint16)


class Sum:
    """Terms added one after the other. It starts with its first term, not with zero."""

    def __init__(self) -> None:
        self.value: Values | None = None

    def add(self, term: Values | None) -> None:
        """One more term; None, the sum of nothing, adds nothing."""
        if term is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                self.value = term if self.value is None else self.value + term
