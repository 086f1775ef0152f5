"""What network entries are made of; where libraries lie; what is asked of compiler and linker for
nvshmem, and what is said when something is missing. All of them are doubles; tests/device_compile
has the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastkern.config import read_compiler_environment, read_prefix
from fastkern.device import compile as device_compile
from fastkern.device.compile import COMPILERS, compile_entry, compile_with
from fastkern.device.compile_nvshmem import NvshmemCompiler
from fastkern.device.kernel_cache import KernelCache
from fastkern.device.libraries import find_cuda_headers, find_nccl, find_nvcc, identity, read_macro
from fastkern.device.sources import MOVING, NETWORKS, entry_names, image_name, read_network_entry
from fastkern.errors import CompileError, DeviceUnavailableError
from tests.device.compile_cases import FakeCompiler
from tests.device.network_doubles import (
    WHEELS,
    Change,
    Core,
    NvJitLink,
    hide_machine,
    install_cuda,
    newer,
    write_files,
    write_nvcc,
)

# -- sources and arguments -------------------------------------------------------------------------


def test_network_entries_and_what_they_include() -> None:
    libraries = {"nvshmem": "device/nvshmem_defines.h", "nccl_gin": "nccl_device.h"}
    for transport, target in NETWORKS.items():
        source = read_network_entry(transport)
        assert (source.name, source.target) == (f"network/{transport}", target)
        own = {f"kernels/target/{target}.h", f"kernels/transport/{transport}.h"}
        assert own | {"kernels/transport/network.h", "planner/stage_table.h"} <= set(source.files)
        if transport in libraries:
            assert libraries[transport] in source.libraries
        else:
            assert source.libraries == ()
            assert "kernels/transport/rocshmem_declarations.h" in source.files


def test_other_includes_of_a_network_entry_are_refused(tmp_path: Path) -> None:
    path = "kernels/entry/network/nvshmem.cu"
    write_files(tmp_path, {path: "#include FASTKERN_HEADER\n#include <a.h>\n"})
    assert read_network_entry("nvshmem", tmp_path).libraries == ("a.h",)
    write_files(tmp_path, {path: "#include HEADER\n"})
    with pytest.raises(ValueError, match=r"nvshmem\.cu: #include HEADER"):
        read_network_entry("nvshmem", tmp_path)


def test_kernels_that_move_rows_are_one_image() -> None:
    assert {image_name(entry, "nvshmem") for entry in MOVING} == {"network/nvshmem"}
    assert image_name("route", "nvshmem") == "route"
    assert {image_name(entry, "peer") for entry in MOVING} == set(MOVING)
    assert set(MOVING) == {*entry_names("cuda")} - {"route", "static"}


@pytest.mark.parametrize(
    ("entry", "target", "transport", "match"),
    [
        ("nothing", "cuda", "nvshmem", "no entry 'nothing' for cuda"),
        ("exchange", "hip", "nvshmem", "nvshmem is for cuda, not for hip"),
        ("exchange", "cuda", "rocshmem", "rocshmem is for hip, not for cuda"),
        ("exchange", "cuda", "shm", "transport must be one of peer, nvshmem, nccl_gin, rocshmem"),
        ("route", "cuda", "smoke", "transport must be one of"),
    ],
)
def test_arguments(entry: str, target: str, transport: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        compile_entry(entry, target, "sm_90", cache=KernelCache(None), transport=transport)


@pytest.mark.parametrize("transport", NETWORKS)
def test_architectures_are_checked(transport: str) -> None:
    target = NETWORKS[transport]
    with pytest.raises(ValueError, match="arch must be written like"):
        compile_entry("exchange", target, "x90", cache=KernelCache(None), transport=transport)


def test_each_transport_has_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_compile, "ready_image", lambda *_: None)
    cache = KernelCache(None)
    found = {}
    for name in ("cuda", *NETWORKS):
        monkeypatch.setitem(COMPILERS, name, FakeCompiler(name))
    for transport in ("peer", "nvshmem", "nccl_gin"):
        for entry in ("exchange", "combine", "route"):
            code = compile_entry(entry, "cuda", "sm_90", cache=cache, transport=transport)
            found[transport, entry] = code.decode()
    for transport in ("nvshmem", "nccl_gin"):
        assert found[transport, "exchange"] == f"{transport} sm_90 {{}} 1"
        assert found[transport, "combine"] == found[transport, "exchange"]
        assert found[transport, "route"] == found["peer", "route"]
    assert found["peer", "exchange"] == "cuda sm_90 {} 1"


# -- where libraries lie ---------------------------------------------------------------------------


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """nvidia/ with all wheels in it, and nothing else on the machine."""
    return write_files(hide_machine(monkeypatch, tmp_path), WHEELS)


def test_prefixes_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("CUDA_PATH", "/cuda")
    assert read_prefix("cuda") == Path("/cuda")
    monkeypatch.setenv("CUDA_HOME", "/home/cuda")
    assert read_prefix("cuda") == Path("/home/cuda")
    monkeypatch.delenv("ROCSHMEM_HOME", raising=False)
    assert read_prefix("rocshmem") is None
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("NVCC_CCBIN", "g++")
    assert {"NVCC_APPEND_FLAGS", "NVCC_CCBIN"} & set(read_compiler_environment()) == {"NVCC_CCBIN"}


def test_wheels_come_before_prefixes(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_files(
        tmp_path / "other",
        {"include/nccl_device.h": "", "include/cuda_runtime.h": "", "include/cuda/std/cstdint": ""},
    )
    nvcc = write_nvcc(other / "bin/nvcc", tmp_path / "log")
    for name in ("NCCL_HOME", "CUDA_HOME"):
        monkeypatch.setenv(name, str(other))
    assert find_nccl() == wheels / "nccl"
    assert find_cuda_headers() == [wheels / "cu13/include", wheels / "cu13/include/cccl"]
    assert find_nvcc() == nvcc
    of_wheel = write_nvcc(wheels / "cu13/bin/nvcc", tmp_path / "log")
    assert find_nvcc() == of_wheel
    of_wheel.chmod(0o600)
    assert find_nvcc() == nvcc
    on_path = write_nvcc(tmp_path / "bin/nvcc", tmp_path / "log")
    assert find_nvcc() == on_path

    (wheels / "nccl/include/nccl_device.h").unlink()
    (wheels / "cu13/include/cuda_runtime.h").unlink()
    (wheels / "cu13/include/cccl/cuda/std/cstdint").unlink()
    assert find_nccl() == other
    assert find_cuda_headers() == [other / "include"]
    monkeypatch.delenv("CUDA_HOME")
    assert find_cuda_headers() is None


def test_identity_tells_files_apart(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/x.h": "1", "a/b/y.h": "2"})
    found = {identity([tmp_path / "a"])}
    newer(tmp_path / "a/b/y.h")
    found.add(identity([tmp_path / "a"]))
    write_files(tmp_path, {"a/z.h": ""})
    found.add(identity([tmp_path / "a"]))
    found.add(identity([tmp_path / "a/z.h"]))
    assert len(found) == 4
    assert identity([tmp_path / "a/z.h"]) in found


def test_macros_of_headers(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.h": "// #define A 1\n  # define AB  22\n#define A 3 // three\n"})
    assert read_macro(tmp_path / "a.h", "A") == 3
    assert read_macro(tmp_path / "a.h", "B") is None
    assert read_macro(tmp_path / "none.h", "A") is None


# -- nvshmem ---------------------------------------------------------------------------------------


def compile_nvshmem(defines: dict[str, str] | None = None) -> bytes:
    source = read_network_entry("nvshmem")
    return compile_with(NvshmemCompiler(), source, "sm_90", defines, KernelCache(None))


def test_what_is_asked_for_nvshmem(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, linker = Core(), NvJitLink()
    install_cuda(monkeypatch, core, linker)
    assert compile_nvshmem({"A": "1"}) == b"linked"
    source = read_network_entry("nvshmem")
    ((text, options),) = core.asked
    assert text == source.text
    assert options == {
        # With its folder: beside the source is not the current folder.
        "name": str(source.root / "kernels/entry/network/nvshmem.cu"),
        "arch": "sm_90",
        "include_path": [
            str(folder)
            for folder in (
                source.root,
                wheels / "nvshmem/include",
                wheels / "cu13/include",
                wheels / "cu13/include/cccl",
            )
        ],
        "define_macro": [("A", "1")],
        "std": "c++17",
        "relocatable_device_code": True,
    }
    assert linker.asked == [
        ("create", "-arch=sm_90"),
        ("add_data", "cubin", b"relocatable", "nvshmem.cu"),
        ("add_file", "library", str(wheels / "nvshmem/lib/libnvshmem_device.a")),
        ("complete",),
    ]
    assert linker.destroyed == 1


@pytest.mark.parametrize("call", ["create", "add_data", "add_file", "complete"])
def test_linking_nvshmem_fails(call: str, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = NvJitLink(failing=call)
    install_cuda(monkeypatch, Core(), linker)
    with pytest.raises(CompileError, match=f"ERROR_{call}") as caught:
        compile_nvshmem()
    assert "network/nvshmem does not compile for cuda sm_90" in str(caught.value)
    assert ("no 'nvshmem_x'!" in caught.value.log) == (call != "create")
    assert linker.destroyed == (call != "create")


def test_compiling_nvshmem_fails(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = NvJitLink()
    install_cuda(monkeypatch, Core(LookupError("nvshmem.h(3): error: no")), linker)
    with pytest.raises(CompileError, match=r"nvshmem\.h\(3\)"):
        compile_nvshmem()
    assert linker.asked == []


CHANGES: dict[str, Change] = {
    "library": lambda wheels: newer(wheels / "nvshmem/lib/libnvshmem_device.a"),
    "header": lambda wheels: newer(wheels / "nvshmem/include/nvshmem.h"),
    "another header": lambda wheels: (wheels / "nvshmem/include/x.h").touch(),
    "cuda": lambda wheels: newer(wheels / "cu13/include/cuda.h"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_libraries_of_nvshmem_are_part_of_the_key(
    change: str, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core()
    install_cuda(monkeypatch, core, NvJitLink())
    source = read_network_entry("nvshmem")
    for count in (1, 1, 2, 2):
        if count == 2 and len(core.asked) == 1:
            CHANGES[change](wheels)
        cache = KernelCache(tmp_path / "kernels")
        compile_with(NvshmemCompiler(), source, "sm_90", None, cache)
        assert len(core.asked) == count
    assert "NVSHMEM 3.8.1, CUDA headers 13050" in NvshmemCompiler().version()


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        ("nvshmem/include/nvshmem.h", r"no nvshmem\.h with libnvshmem_device\.a"),
        ("nvshmem/lib/libnvshmem_device.a", r"no nvshmem\.h with libnvshmem_device\.a"),
        ("cu13/include/cuda_runtime.h", r"no cuda_runtime\.h, or none of CCCL's"),
        ("cu13/include/cccl/cuda/std/cstdint", r"no cuda_runtime\.h, or none of CCCL's"),
    ],
)
def test_nvshmem_is_missing(
    missing: str, match: str, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_cuda(monkeypatch, Core(), NvJitLink())
    (wheels / missing).unlink()
    with pytest.raises(DeviceUnavailableError, match=match) as caught:
        compile_nvshmem()
    assert "pip install 'fastkern[nvshmem]'" in str(caught.value)


@pytest.mark.parametrize(
    ("linker", "match"),
    [(None, "cannot import cuda.bindings.nvjitlink"), (NvJitLink(library=False), "not found")],
    ids=["no bindings", "no library"],
)
def test_nvjitlink_is_missing(
    linker: NvJitLink | None, match: str, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_cuda(monkeypatch, Core(), linker)
    with pytest.raises(DeviceUnavailableError, match=match):
        compile_nvshmem()
