"""Reading and rounding of 16-bit floats in the kernels against PyTorch, bit for bit.

All 2^16 patterns; each tie between two neighbours and the floats next to it; random bits. A NaN
must stay one; its payload is free.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

Halves = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Convert = Callable[[str, str, bytes], bytes]


def compile_converter(folder: Path) -> Convert:
    """(type, "widen" or "round", values) -> values, as the kernels do it; compiled into folder."""
    compiler = shutil.which("c++")
    assert compiler, "no host compiler `c++`; fastkern itself needs one to build"
    program = folder / "number_check"
    flags = ["-O3", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}"]
    source = str(Path(__file__).with_name("number_check.cc"))
    subprocess.run([compiler, *flags, source, "-o", str(program)], check=True, timeout=120)

    def run(name: str, direction: str, values: bytes) -> bytes:
        command = [str(program), name, direction]
        done = subprocess.run(command, input=values, capture_output=True, timeout=120, check=True)
        return done.stdout

    return run


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Of the host compiler."""
    return compile_converter(tmp_path_factory.mktemp("number"))


def widened(name: str, halves: Halves) -> Floats:
    """By PyTorch."""
    values = torch.from_numpy(halves.view(np.int16)).view(DTYPES[name]).float()
    result: Floats = values.numpy()
    return result


def rounded(name: str, floats: Floats) -> Halves:
    """By PyTorch."""
    result: Halves = (
        torch.from_numpy(floats).to(DTYPES[name]).view(torch.int16).numpy().view(np.uint16)
    )
    return result


def all_patterns() -> Halves:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def ties(name: str) -> Floats:
    """The middle of each finite value and the next one away from zero, the floats next to it, and
    the values themselves."""
    magnitudes = np.arange(0x7F80 if name == "bfloat16" else 0x7C00, dtype=np.uint16)
    here = widened(name, magnitudes).astype(np.float64)
    step = np.diff(here, append=2 * here[-1] - here[-2])  # past the last: as if it went on
    middle = (here + step / 2).astype(np.float32)
    assert ((middle.astype(np.float64) - here) * 2 == step).all()  # exact
    up = np.nextafter(middle, np.float32(np.inf))
    down = np.nextafter(middle, np.float32(0))
    positive = np.concatenate([middle, up, down, here.astype(np.float32)])
    return np.concatenate([positive, -positive])


def random_floats() -> Floats:
    """Of any bits, and of the magnitudes where float16 has subnormals."""
    generator = np.random.default_rng(7)
    bits = generator.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    small = generator.integers(0x32000000, 0x39000000, 1 << 18, dtype=np.uint32)
    signs = generator.integers(0, 2, small.shape, dtype=np.uint32) << 31
    return np.concatenate([bits, small | signs]).view(np.float32)


SPECIAL = """
    00000000 00000001 007fffff 00800000 33000000 33000001 33800000 387fc000 387fe000 38800000
    477fe000 477fefff 477ff000 47800000 7f7f7fff 7f7f8000 7f7fffff 7f800000 7f800001 7fbfffff
    7fc00000 7fffffff
"""


def check_rounding(name: str, floats: Floats, convert: Convert) -> None:
    got = np.frombuffer(convert(name, "round", floats.tobytes()), dtype=np.uint16)
    assert got.shape == floats.shape
    nans = np.isnan(floats)
    assert np.isnan(widened(name, got[nans])).all()
    expected = rounded(name, floats)
    wrong = np.flatnonzero((got != expected) & ~nans)
    assert len(wrong) == 0, [
        (hex(floats.view(np.uint32)[k]), hex(got[k]), hex(expected[k])) for k in wrong[:5]
    ]


@pytest.mark.parametrize("name", DTYPES)
def test_every_pattern_is_read(name: str, convert: Convert) -> None:
    halves = all_patterns()
    got = np.frombuffer(convert(name, "widen", halves.tobytes()), dtype=np.float32)
    expected = widened(name, halves)
    nans = np.isnan(expected)
    assert nans.sum() == (2 * 127 if name == "bfloat16" else 2 * 1023)
    assert np.isnan(got[nans]).all()
    assert (got.view(np.uint32) == expected.view(np.uint32))[~nans].all()


@pytest.mark.parametrize("name", DTYPES)
def test_every_pattern_comes_back(name: str, convert: Convert) -> None:
    halves = all_patterns()
    back = np.frombuffer(
        convert(name, "round", convert(name, "widen", halves.tobytes())), dtype=np.uint16
    )
    nans = np.isnan(widened(name, halves))
    assert (back == halves)[~nans].all()
    assert np.isnan(widened(name, back[nans])).all()


@pytest.mark.parametrize("name", DTYPES)
def test_ties_go_to_even(name: str, convert: Convert) -> None:
    check_rounding(name, ties(name), convert)


@pytest.mark.parametrize("name", DTYPES)
def test_random_floats(name: str, convert: Convert) -> None:
    check_rounding(name, random_floats(), convert)


@pytest.mark.parametrize("name", DTYPES)
def test_special_floats(name: str, convert: Convert) -> None:
    """Zeros, infinities, NaNs, subnormals, limits of what is normal and of what is finite."""
    bits = np.array([int(word, 16) for word in SPECIAL.split()], dtype=np.uint32)
    floats = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    check_rounding(name, floats, convert)


def test_a_known_value() -> None:
    """What the comparison rests on: 257 is a tie in bfloat16, and goes to 256."""
    assert rounded("bfloat16", np.float32([257.0, 258.0, 259.0])).tolist() == [
        0x4380,
        0x4381,
        0x4382,
    ]
