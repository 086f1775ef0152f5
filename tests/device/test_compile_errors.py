"""What is handed to the compilers, and what is said when they are missing or find an error.

The compilers are doubles; tests/device_compile runs the real one for CUDA.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fastkern.device.compile import COMPILERS, compile_entry, compile_with
from fastkern.device.compile_cuda import CudaCompiler
from fastkern.device.compile_hip import HIP_FLAGS, HipCompiler
from fastkern.device.kernel_cache import KernelCache
from fastkern.device.sources import EntrySource, entry_names, include_root, read_entry
from fastkern.errors import CompileError, DeviceUnavailableError, FastkernError
from tests.device.compile_cases import FILES, write_tree
from tests.device.hiprtc_double import HipRtc, hip_module


@pytest.fixture
def thing(tmp_path: Path) -> Callable[[str], EntrySource]:
    """The entry `thing` for a target."""
    root = write_tree(tmp_path / "tree")
    return lambda target: read_entry("thing", target, root)


def test_an_entry_with_all_that_it_includes(thing: Callable[[str], EntrySource]) -> None:
    for target, suffix in (("cuda", "cu"), ("hip", "hip")):
        source = thing(target)
        names = {f"kernels/entry/thing.{suffix}", "kernels/body/outer.h", "planner/table.h"}
        assert source.files == {name: FILES[name] for name in names}
        assert source.text == FILES[source.path]
        assert source.file_name == f"thing.{suffix}"


def test_the_packages_own_entries() -> None:
    names = ["combine", "dispatch", "exchange", "route", "static"]
    assert entry_names("cuda") == entry_names("hip") == names
    for target in ("cuda", "hip"):
        for name in names:
            files = read_entry(name, target).files
            assert {f"kernels/target/{target}.h", "planner/stage_table.h"} <= set(files)
            assert all((include_root() / path).read_text() == files[path] for path in files)


@pytest.mark.parametrize(
    ("file", "text", "error", "match"),
    [
        ("kernels/body/outer.h", "#include <vector>\n", ValueError, "outer.h: #include <vector>"),
        ("planner/table.h", "#include NAME\n", ValueError, "table.h: #include NAME"),
        ("planner/table.h", '#include "gone.h"', FileNotFoundError, "gone.h, which planner/table"),
    ],
)
def test_includes_that_cannot_be_followed(
    file: str, text: str, error: type[Exception], match: str, tmp_path: Path
) -> None:
    root = write_tree(tmp_path)
    (root / file).write_text(text)
    with pytest.raises(error, match=match):
        read_entry("thing", "cuda", root)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("nothing", "cuda", "sm_90"), "no entry 'nothing' for cuda .* exchange"),
        (("../entry/exchange", "cuda", "sm_90"), "no entry"),
        (("exchange", "metal", "sm_90"), "target must be one of cuda, hip"),
        (("exchange", "cuda", "compute_90"), 'arch must be written like "sm_90"'),
        (("exchange", "cuda", "sm_90 -G"), "arch"),
        (("exchange", "hip", "sm_90"), 'arch must be written like "gfx942"'),
        (("exchange", "cuda", "sm_90", {"A B": "1"}), "not a macro: A B=1"),
        (("exchange", "cuda", "sm_90", {"A": "1 -G"}), "not a macro: A=1 -G"),
    ],
)
def test_arguments(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        compile_entry(*arguments, cache=KernelCache(None))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f", "gfx90a", "gfx942:sramecc+:xnack-"])
def test_architectures(arch: str) -> None:
    COMPILERS["cuda" if arch.startswith("sm") else "hip"].check_arch(arch)


def test_errors_can_be_pickled_and_name_the_entry() -> None:
    error = CompileError("exchange", "cuda", "sm_90", "thing.cu(1): error: no\n")
    again = pickle.loads(pickle.dumps(error))
    for found in (error, again):
        assert str(found) == ("exchange does not compile for cuda sm_90:\nthing.cu(1): error: no")
        fields = (found.entry, found.target, found.arch, found.log)
        assert fields == ("exchange", "cuda", "sm_90", "thing.cu(1): error: no\n")
        assert isinstance(found, FastkernError)
    assert issubclass(DeviceUnavailableError, FastkernError)


# -- CUDA ------------------------------------------------------------------------------------------


class CudaCore(ModuleType):
    """cuda.core as far as it is used, and what it was asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("cuda.core")
        self.__version__ = "1.2.3"
        self.error = error
        self.asked: list[tuple[str, str, dict[str, Any]]] = []

    def ProgramOptions(self, **options: Any) -> dict[str, Any]:  # noqa: N802
        return options

    def Program(self, code: str, code_type: str, options: dict[str, Any]) -> CudaCore:  # noqa: N802
        self.asked.append((code, code_type, options))
        return self

    def compile(self, target_type: str) -> SimpleNamespace:
        assert target_type == "cubin"
        if self.error is not None:
            raise self.error
        return SimpleNamespace(code=bytearray(b"\x7fELF"))


def install_cuda(monkeypatch: pytest.MonkeyPatch, core: CudaCore | None, nvrtc: Any) -> None:
    """Put doubles, or nothing (None), where cuda.core and cuda.bindings.nvrtc would be."""
    modules: dict[str, Any] = {"cuda.core": core, "cuda.bindings.nvrtc": nvrtc}
    for name in ("cuda", "cuda.bindings"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def nvrtc_of(major: int, minor: int, status: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        nvrtcVersion=lambda: (status, major, minor),
        nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0),
    )


def test_what_nvrtc_is_asked(
    thing: Callable[[str], EntrySource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = CudaCore()
    install_cuda(monkeypatch, core, nvrtc_of(13, 5))
    source = thing("cuda")
    code = compile_with(CudaCompiler(), source, "sm_90", {"B": "", "A": "1"}, KernelCache(None))
    assert code == b"\x7fELF"
    assert type(code) is bytes
    options = {
        "name": "thing.cu",
        "arch": "sm_90",
        "include_path": [str(source.root)],
        "define_macro": [("A", "1"), ("B", "")],
        "std": "c++17",
        "no_source_include": True,
    }
    assert core.asked == [(source.text, "c++", options)]


def test_versions_of_nvrtc_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for core_version, major, minor in (("1.2", 13, 5), ("1.2", 13, 6), ("1.3", 13, 5)):
        core = CudaCore()
        core.__version__ = core_version
        install_cuda(monkeypatch, core, nvrtc_of(major, minor))
        found.add(CudaCompiler().version())
    assert len(found) == 3


def no_library() -> None:
    raise RuntimeError("libnvrtc.so.13 not found")


@pytest.mark.parametrize(
    ("core", "nvrtc", "match"),
    [
        (None, nvrtc_of(13, 5), "cannot import cuda.core"),
        (CudaCore(), None, "cannot import cuda.bindings.nvrtc"),
        (CudaCore(), SimpleNamespace(nvrtcVersion=no_library), "libnvrtc.so.13 not found"),
        (CudaCore(), nvrtc_of(0, 0, status=7), "nvrtcVersion: 7"),
    ],
    ids=["no cuda-core", "no cuda-bindings", "no libnvrtc", "broken libnvrtc"],
)
def test_cuda_is_missing(
    core: CudaCore | None, nvrtc: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_cuda(monkeypatch, core, nvrtc)
    with pytest.raises(DeviceUnavailableError, match=match) as caught:
        compile_entry("exchange", "cuda", "sm_90", cache=KernelCache(None))
    assert "pip install 'fastkern[cuda]'" in str(caught.value)


def test_nvrtc_finds_an_error(
    thing: Callable[[str], EntrySource], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = LookupError("6: NVRTC_ERROR_COMPILATION, thing.cu(3): error: no such thing")
    install_cuda(monkeypatch, CudaCore(said), nvrtc_of(13, 5))
    with pytest.raises(CompileError, match="no such thing") as caught:
        compile_with(CudaCompiler(), thing("cuda"), "sm_90", None, KernelCache(None))
    assert "thing does not compile for cuda sm_90" in str(caught.value)
    assert caught.value.__cause__ is said


# -- HIP -------------------------------------------------------------------------------------------


@pytest.fixture
def rtc(monkeypatch: pytest.MonkeyPatch) -> HipRtc:
    double = HipRtc()
    monkeypatch.setitem(sys.modules, "hip", hip_module(double))
    return double


def test_what_hiprtc_is_asked(thing: Callable[[str], EntrySource], rtc: HipRtc) -> None:
    source = thing("hip")
    arch = "gfx942:sramecc+:xnack-"
    code = compile_with(HipCompiler(), source, arch, {"B": "", "A": "1"}, KernelCache(None))
    assert code == rtc.code
    assert type(code) is bytes
    (program,) = rtc.programs
    assert program.name == b"thing.hip"
    assert program.source == source.text.encode()
    assert program.headers == {
        name.encode(): FILES[name].encode() for name in ("kernels/body/outer.h", "planner/table.h")
    }
    assert program.options == [
        b"--offload-arch=gfx942:sramecc+:xnack-",
        *(flag.encode() for flag in HIP_FLAGS),
        *(b"-DA=1", b"-DB="),
    ]
    assert program.destroyed


def test_the_packages_own_entries_go_to_hiprtc(rtc: HipRtc) -> None:
    for name in entry_names("hip"):
        compile_entry(name, "hip", "gfx942", cache=KernelCache(None))
    assert all(b"kernels/target/hip.h" in program.headers for program in rtc.programs)
    assert len(rtc.programs) == 5


@pytest.mark.parametrize(
    ("log", "said"),
    [(HipRtc.log, "thing.hip:1: error: no such thing"), (b"", ""), (b"\xff\0", "\ufffd")],
    ids=["log", "no log", "no text"],
)
def test_hiprtc_finds_an_error(
    log: bytes, said: str, thing: Callable[[str], EntrySource], rtc: HipRtc
) -> None:
    rtc.code, rtc.log = None, log
    with pytest.raises(CompileError, match="thing does not compile for hip gfx942") as caught:
        compile_with(HipCompiler(), thing("hip"), "gfx942", None, KernelCache(None))
    assert caught.value.log.splitlines()[0] == "<Status.HIPRTC_ERROR_COMPILATION: 6>"
    assert "".join(caught.value.log.splitlines()[1:]) == said
    assert [program.destroyed for program in rtc.programs] == [True]


@pytest.mark.parametrize(
    "call",
    ["hiprtcCreateProgram", "hiprtcGetCodeSize", "hiprtcGetCode", "hiprtcGetProgramLogSize"],
)
def test_a_call_of_hiprtc_fails(
    call: str, thing: Callable[[str], EntrySource], rtc: HipRtc
) -> None:
    rtc.failing = (call,)
    if "Log" in call:
        rtc.code = None
    with pytest.raises(CompileError, match=f"{call}: <Status.HIPRTC_ERROR_INVALID_INPUT: 3>"):
        compile_with(HipCompiler(), thing("hip"), "gfx942", None, KernelCache(None))
    assert all(program.destroyed for program in rtc.programs)


@pytest.mark.parametrize(
    ("rtc", "match"),
    [
        (None, "cannot import hip-python"),
        (HipRtc(library=False), "failed to dlopen 'libhiprtc.so'"),
        (HipRtc(failing=("hiprtcVersion",)), "hiprtcVersion: <Status.HIPRTC_ERROR_INVALID_INPUT"),
        (HipRtc(failing=("hipRuntimeGetVersion",)), "hipRuntimeGetVersion: "),
    ],
    ids=["no hip-python", "no libhiprtc", "broken libhiprtc", "broken libamdhip64"],
)
def test_hip_is_missing(rtc: HipRtc | None, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hip", None if rtc is None else hip_module(rtc))
    with pytest.raises(DeviceUnavailableError, match=match) as caught:
        compile_entry("exchange", "hip", "gfx942", cache=KernelCache(None))
    assert "pip install 'fastkern[rocm]'" in str(caught.value)


def test_a_missing_compiler_is_said_even_with_its_code_in_the_cache(
    thing: Callable[[str], EntrySource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its version, its code cannot be told from another version's."""
    install_cuda(monkeypatch, CudaCore(), nvrtc_of(13, 5))
    arguments = (CudaCompiler(), thing("cuda"), "sm_90", None)
    compile_with(*arguments, KernelCache(tmp_path / "kernels"))
    install_cuda(monkeypatch, None, None)
    with pytest.raises(DeviceUnavailableError):
        compile_with(*arguments, KernelCache(tmp_path / "kernels"))
