"""Compiling the kernels in Triton ahead of time: images, their keys, what is refused. No GPU."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastkern.device import compile_triton as module
from fastkern.device.compile_triton import compile_triton
from fastkern.device.kernel_cache import KernelCache
from fastkern.device.records import DTYPES
from fastkern.device.triton_image import TritonImage, TritonKernel, pack_image, unpack_image
from fastkern.device.triton_parameters import check_parameters, read_parameters
from fastkern.errors import CompileError, DeviceUnavailableError

triton = pytest.importorskip("triton", reason="Triton is not installed")

from fastkern.kernels.triton import entry, layout  # noqa: E402
from tests.device import triton_kernels  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: nothing can be compiled", allow_module_level=True)

CONSTANTS = {"TILE_BYTES": 1024}
SM_90, GFX942 = ("cuda", "sm_90"), ("hip", "gfx942")


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


@pytest.fixture(autouse=True)
def small_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernels.use(monkeypatch)


def kernel_of(image: bytes) -> TritonKernel:
    (kernel,) = unpack_image(image).kernels
    return kernel


@pytest.mark.parametrize(
    ("target", "arch", "num_lanes"),
    [
        (*SM_90, 32),
        (*SM_90, 256),
        (*SM_90, 1024),
        ("cuda", "sm_80", 128),
        ("cuda", "sm_100", 512),
        (*GFX942, 64),
        (*GFX942, 256),
        ("hip", "gfx90a", 128),
        ("hip", "gfx950", 1024),
    ],
)
def test_an_image(cache: KernelCache, target: str, arch: str, num_lanes: int) -> None:
    image = unpack_image(compile_triton("exchange", target, arch, num_lanes, CONSTANTS, cache))
    assert (image.target, image.arch, image.constants) == (target, arch, CONSTANTS)
    (kernel,) = image.kernels
    assert (kernel.name, kernel.num_lanes) == ("fastkern_exchange", num_lanes)
    warps = num_lanes // {"cuda": 32, "hip": 64}[target]
    assert kernel.shared_bytes == (8 * warps if warps > 1 else 0)  # a partial sum of each
    assert kernel.record_bytes == 16
    assert kernel.offsets[:3] == (0, 8, 12)
    assert kernel.offsets[3:] == tuple(range(16, kernel.parameter_bytes, 8))
    assert kernel.code.startswith(b"\x7fELF")
    assert b"fastkern_exchange" in kernel.code


def test_a_cubin_says_the_same(cache: KernelCache) -> None:
    """The driver's own record of where the parameters lie: EIATTR_KPARAM_INFO, 0x17."""
    kernel = kernel_of(compile_triton("exchange", *SM_90, 128, CONSTANTS, cache))
    code, found, at = kernel.code, {}, 0
    while (at := code.find(b"\x04\x17\x0c\x00", at)) >= 0:
        _, ordinal, offset, flags = struct.unpack_from("<IHHI", code, at + 4)
        found[ordinal] = offset, flags >> 18
        at += 16
    sizes = [8, 4, 4, *[8] * (len(kernel.offsets) - 3)]
    assert [found[k] for k in range(len(found))] == list(zip(kernel.offsets, sizes, strict=True))


def test_all_kernels_of_an_entry(monkeypatch: pytest.MonkeyPatch, cache: KernelCache) -> None:
    monkeypatch.setitem(entry.ENTRIES, "exchange", ("fastkern_exchange",) * 2)
    image = unpack_image(compile_triton("exchange", *SM_90, 128, CONSTANTS, cache))
    first, second = image.kernels
    assert first == second


def test_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: KernelCache
) -> None:
    """Neither in Triton's folder nor in the temporary one, nor in its settings."""
    cache_dir, temporary = tmp_path / "triton", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache_dir))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = dict(os.environ)
    compile_triton("exchange", *SM_90, 128, CONSTANTS, cache)
    triton_kernels.use(monkeypatch, triton_kernels.does_not_compile())
    with pytest.raises(CompileError):
        compile_triton("exchange", *SM_90, 64, CONSTANTS, cache)
    assert not cache_dir.exists()
    assert list(temporary.iterdir()) == []
    assert dict(os.environ) == before
    assert triton.knobs.cache.dir == str(cache_dir)
    assert not triton.knobs.compilation.always_compile


# -- the cache of compiled kernels -----------------------------------------------------------------


class Keys(KernelCache):
    """Only notes what is asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: list[str] = []

    def get(self, key: str, make: Any) -> bytes:
        self.asked.append(key)
        return b""


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes the code changes the key; nothing is compiled here."""
    keys = Keys()

    def ask(
        name: str = "exchange",
        where: tuple[str, str] = SM_90,
        lanes: int = 128,
        constants: Mapping[str, int] = CONSTANTS,
    ) -> None:
        compile_triton(name, *where, lanes, constants, keys)

    ask()
    ask()
    assert keys.asked[0] == keys.asked[1]
    ask("dispatch")
    ask(where=("cuda", "sm_100"))
    ask(where=GFX942)
    ask(lanes=256)
    ask(constants={"TILE_BYTES": 2048})
    changed_sources = {**module.sources(), "exchange.py": "# new"}
    for name, value in (
        ("__version__", "0.0.0"),
        ("sources", lambda: changed_sources),
        ("_tools", lambda *_: ["another assembler"]),
        ("_OPTIONS", {"num_stages": 2, "enable_fp_fusion": False}),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            ask()
    with monkeypatch.context() as changed:  # the device by itself: its tools say it too
        changed.setattr(module, "_tools", lambda *_: [])
        ask()
        ask(where=("cuda", "sm_100"))
        ask(where=GFX942)
    for where, name in ((layout, "DIGEST"), (triton, "__version__")):
        with monkeypatch.context() as changed:
            changed.setattr(where, name, "4.0.0")
            ask()
    ask()
    assert keys.asked[-1] == keys.asked[0]
    assert len(set(keys.asked)) == len(keys.asked) - 2


def test_sources_are_all_files() -> None:
    folder = Path(entry.__file__).parent
    assert set(module.sources()) == {path.name for path in folder.glob("*.py")}
    assert module.sources()["entry.py"] == Path(entry.__file__).read_text()


def test_the_second_time_is_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: KernelCache
) -> None:
    first = compile_triton("exchange", *GFX942, 128, CONSTANTS, cache)
    monkeypatch.setattr(module, "_compile", None)
    again = KernelCache(tmp_path / "kernels")
    assert compile_triton("exchange", *GFX942, 128, CONSTANTS, again) == first


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("exchange", "host", "x86", 128), "target must be one of cuda, hip, not 'host'"),
        (("exchange", "cuda", "gfx942", 128), 'arch must be like "sm_90"'),
        (("exchange", "hip", "gfx1100", 128), "arch must be like .*waves of 64 lanes"),
        (("exchange", *SM_90, 96), "num_lanes must be 32 times a power of two, .*not 96"),
        (("exchange", *SM_90, 2048), "num_lanes must be 32 times a power of two, .*not 2048"),
        (("exchange", *SM_90, 16), "num_lanes must be 32"),
        (("exchange", *GFX942, 32), "num_lanes must be 64 times a power of two, .*not 32"),
        (("exchange", *GFX942, 0), "num_lanes must be 64"),
        (("static", *SM_90, 128), "no entry 'static' in Triton; there are: exchange, "),
    ],
)
def test_unknown_names(given: Any, text: str, cache: KernelCache) -> None:
    with pytest.raises(ValueError, match=text):
        compile_triton(*given, CONSTANTS, cache)


def test_errors_of_the_compiler(monkeypatch: pytest.MonkeyPatch, cache: KernelCache) -> None:
    triton_kernels.use(monkeypatch, triton_kernels.does_not_compile())
    with pytest.raises(CompileError, match="nowhere is not defined") as found:
        compile_triton("exchange", *GFX942, 128, CONSTANTS, cache)
    assert str(found.value).startswith("exchange does not compile for hip gfx942:\n")


@pytest.mark.parametrize("where", [SM_90, GFX942], ids=lambda w: w[1])
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (triton_kernels.another_order(), "parameters num_ranks, ranks, .* not ranks, num_ranks"),
        (triton_kernels.another_name, "name is another_name, not fastkern_exchange"),
        (triton_kernels.much_shared(), r"shared is \d{5,6}, at most 49152"),
    ],
    ids=["order", "name", "shared"],
)
def test_kernels_that_cannot_be_launched(
    monkeypatch: pytest.MonkeyPatch,
    cache: KernelCache,
    where: tuple[str, str],
    kernel: Any,
    text: str,
) -> None:
    triton_kernels.use(monkeypatch, kernel)
    with pytest.raises(CompileError, match=text):
        compile_triton("exchange", *where, 128, CONSTANTS, cache)


def test_constants_that_a_kernel_does_not_have(cache: KernelCache) -> None:
    with pytest.raises(CompileError, match=r"parameters ranks, .*TILE_BYTES, not ranks"):
        compile_triton("exchange", *SM_90, 128, {}, cache)


def test_scratch_is_refused() -> None:
    class Metadata:
        num_warps, num_ctas, shared, name = 4, 1, 0, "kernel"
        global_scratch_size, profile_scratch_size = 0, 0

    module._check_metadata("kernel", Metadata, 4)
    for what in ("global_scratch_size", "profile_scratch_size", "tmem_size"):
        wrong = type("Wrong", (Metadata,), {what: 8})
        with pytest.raises(CompileError, match=f"{what} is 8, at most 0"):
            module._check_metadata("kernel", wrong, 4)
    with pytest.raises(CompileError, match="num_warps is 4, not 2"):
        module._check_metadata("kernel", Metadata, 2)


def test_old_and_missing_triton(monkeypatch: pytest.MonkeyPatch, cache: KernelCache) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(DeviceUnavailableError, match=r"Triton 3\.5\.1 is too old.*3\.6"):
        compile_triton("exchange", *SM_90, 128, CONSTANTS, cache)
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    compile_triton("exchange", *SM_90, 128, CONSTANTS, Keys())
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DeviceUnavailableError, match=r"pip install 'fastkern\[triton\]'"):
        compile_triton("exchange", *SM_90, 128, CONSTANTS, cache)


def test_an_interpreting_process_compiles_nothing() -> None:
    text = (
        "from fastkern.device.compile_triton import compile_triton\n"
        "compile_triton('exchange', 'cuda', 'sm_90', 128, {'TILE_BYTES': 1024})"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "DeviceUnavailableError: TRITON_INTERPRET is set" in ended.stderr


# -- parameters and images -------------------------------------------------------------------------

PTX = """
.visible .entry other(
\t.param .u32 other_param_0
)
.visible .entry kernel(
\t.param .u32 kernel_param_0,
\t.param .u64 kernel_param_1,
\t.param .u32 kernel_param_2,
\t.param .u64 .ptr .global .align 1 kernel_param_3
)
"""
METADATA = """
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           4
        .value_kind:     by_value
      - .offset:         8
        .size:           8
        .value_kind:     by_value
      - .offset:         16
        .size:           4
        .value_kind:     by_value
      - .address_space:  global
        .offset:         24
        .size:           8
        .value_kind:     global_buffer
      - .offset:         32
        .size:           4
        .value_kind:     hidden_block_count_x
    .name:           kernel
    .symbol:         kernel.kd
"""


@pytest.mark.parametrize(("target", "text"), [("cuda", PTX), ("hip", METADATA)])
def test_parameters(target: str, text: str) -> None:
    found = read_parameters(target, "kernel", text)
    assert found == [(0, 4), (8, 8), (16, 4), (24, 8)]
    fields = np.dtype(
        {"names": "abc", "formats": ["<u4", "<u8", "<u4"], "offsets": [0, 8, 16], "itemsize": 24}
    )
    check_parameters("kernel", fields, found)
    with pytest.raises(CompileError, match=r"kernel: parameters are at .*, fields at"):
        check_parameters("kernel", DTYPES["LaunchArgs"], found)
    with pytest.raises(CompileError, match="hidden parameter of 4 bytes at 32"):
        check_parameters("kernel", fields, [*found, (32, 4)])
    with pytest.raises(CompileError, match="no parameters"):
        read_parameters(target, "none", text)
    unknown = text.replace(".u64 .ptr", ".b8 .ptr").replace("global_buffer", "image")
    with pytest.raises(CompileError, match="unknown parameter"):
        read_parameters(target, "kernel", unknown)


def test_images_are_whole() -> None:
    kernels = (
        TritonKernel("a", 64, 8, (0, 8), 16, 16, b"code of a"),
        TritonKernel("b", 32, 0, (0,), 8, 16, b""),
    )
    image = TritonImage("cuda", "sm_90", {"TILE_BYTES": 16}, kernels)
    packed = pack_image(image)
    assert unpack_image(packed) == image
    for damaged, text in (
        (packed[:-1], "cut off in a"),
        (packed[:60], "cut off in its header"),
        (packed + b"x", "1 bytes too many"),
        (b"\x7fELF" + packed, "not an image"),
    ):
        with pytest.raises(ValueError, match=text):
            unpack_image(damaged)
