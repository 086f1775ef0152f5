"""The cache of compiled kernels: hits, what its keys tell apart, damage."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastkern.device import compile as device_compile
from fastkern.device.compile import compile_with
from fastkern.device.kernel_cache import KernelCache, key_of
from fastkern.device.sources import read_entry
from tests.device.compile_cases import (
    KEY,
    OTHER,
    FakeCompiler,
    Maker,
    entry_of,
    warnings_of,
    write_tree,
)


def test_second_use_compiles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kernels"
    first = Maker(b"\0\xffcode\n")
    cache = KernelCache(folder)
    assert cache.get(KEY, first) == first.code
    assert cache.get(KEY, Maker(b"wrong")) == first.code
    again = Maker(b"wrong")
    assert KernelCache(folder).get(KEY, again) == first.code  # another process
    assert (first.calls, again.calls) == (1, 0)
    assert KernelCache(folder).get(OTHER, again) == b"wrong"

    entry_of(folder).unlink()
    assert cache.get(KEY, again) == first.code  # from memory
    assert again.calls == 1


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        KernelCache(tmp_path / "new" / "kernels").get(KEY, Maker())
    finally:
        os.umask(before)
    modes = {
        path.name.split("-")[0]: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")
    }
    assert modes == {"new": 0o700, "kernels": 0o700, f"{KEY}.kernel": 0o600, "lock": 0o600}


# What may change, one at a time: (compiler's arguments, arch, target, defines, file, version).
CHANGES: dict[str, dict[str, Any]] = {
    "compiler": {"compiler": {"name": "other"}},
    "compiler version": {"compiler": {"version": "1.1"}},
    "flags": {"compiler": {"flags": ("-O2", "-g")}},
    "arch": {"arch": "sm_90a"},
    "target": {"target": "hip"},
    "macro": {"defines": {"LANES": "256", "NEW": ""}},
    "macro's value": {"defines": {"LANES": "512"}},
    "entry": {"edit": "kernels/entry/thing.cu"},
    "header": {"edit": "kernels/body/outer.h"},
    "nested header": {"edit": "planner/table.h"},
    "fastkern": {"fastkern": "0.0.1"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_part_of_the_key_counts(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path / "tree")

    def compile_once(
        compiler: dict[str, Any] | None = None,
        arch: str = "sm_90",
        target: str = "cuda",
        defines: dict[str, str] | None = None,
        edit: str | None = None,
        fastkern: str | None = None,
    ) -> int:
        """How often the compiler was called, with a new cache on the same folder."""
        fake = FakeCompiler(**compiler or {})
        if edit is not None:
            (root / edit).write_text((root / edit).read_text() + "// edited\n")
        if fastkern is not None:
            monkeypatch.setattr(device_compile, "__version__", fastkern)
        macros = {"LANES": "256"} if defines is None else defines
        source = read_entry("thing", target, root)
        compile_with(fake, source, arch, macros, KernelCache(tmp_path / "kernels"))
        return fake.calls

    assert compile_once() == 1
    assert compile_once() == 0
    assert compile_once(edit="planner/unused.h") == 0
    assert compile_once(**change) == 1
    assert compile_once(**{k: v for k, v in change.items() if k != "edit"}) == 0


def test_the_order_of_macros_does_not_count(tmp_path: Path) -> None:
    fake, cache = FakeCompiler(), KernelCache(tmp_path / "kernels")
    source = read_entry("thing", "cuda", write_tree(tmp_path / "tree"))
    for macros in ({"A": "1", "B": "2"}, {"B": "2", "A": "1"}):
        compile_with(fake, source, "sm_90", macros, cache)
    assert fake.calls == 1


def test_parts_of_a_key_do_not_run_together() -> None:
    keys = [
        key_of(a=["xy", "z"], b=[]),
        key_of(a=["x", "yz"], b=[]),
        key_of(a=["xyz"], b=[]),
        key_of(a=["xy"], b=["z"]),
        key_of(a=["xy", "1:b", "z"]),
        key_of(a=["xy", "z"], c=[]),
        key_of(a=["xy", "z", ""], b=[]),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(b=["z"], a=["xy"]) == keys[3]


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "magic only": lambda whole: whole[:26],
    "cut in the digest": lambda whole: whole[:40],
    "no code": lambda whole: whole[:58],
    "cut": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0",
    "zeroed": lambda whole: bytes(len(whole)),
    **{f"flipped {at}": flip(at) for at in (0, 25, 26, 57, 58, -2)},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_compiled_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KernelCache(tmp_path / "kernels").get(KEY, Maker(b"code of some length"))
    entry = entry_of(tmp_path / "kernels")
    whole = entry.read_bytes()
    assert len(whole) == 58 + 19
    entry.write_bytes(damage(whole))
    again = Maker(b"code of some length")
    assert KernelCache(tmp_path / "kernels").get(KEY, again) == again.code
    assert again.calls == 1
    assert entry.read_bytes() == whole
    assert [text.split(" in ")[0] for text in warnings_of(caplog)] == [f"{KEY}.kernel"]


def test_an_entry_of_another_key_is_found_out(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    KernelCache(folder).get(OTHER, Maker(b"other"))
    entry_of(folder, OTHER).rename(entry_of(folder))
    assert KernelCache(folder).get(KEY, Maker(b"right")) == b"right"


def test_what_cannot_be_read_or_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry_of(tmp_path / "kernels").mkdir(parents=True)
    (tmp_path / "kernels").chmod(0o700)
    cache = KernelCache(tmp_path / "kernels")
    assert cache.get(KEY, Maker()) == b"code"
    assert [text.split(" in ")[0] for text in warnings_of(caplog)] == [
        "a kernel",  # cannot be read
        "a kernel cannot be kept",
    ]
    assert sorted(path.name for path in (tmp_path / "kernels").iterdir()) == sorted(
        [entry_of(tmp_path).name, f"lock-{KEY[0]}"]
    )


def test_a_failed_compile_is_not_kept(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("does not compile")

    cache = KernelCache(tmp_path / "kernels", lock_timeout_s=0.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not compile"):
            cache.get(KEY, fail)
    assert not entry_of(tmp_path / "kernels").exists()
    assert cache.get(KEY, Maker()) == b"code"
