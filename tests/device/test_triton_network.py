"""What the kernels in Triton are linked with between servers: found, or said to be missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from fastkern.device import triton_network
from fastkern.device.compile_triton import compile_triton
from fastkern.device.triton_network import check_triton_network, extern_libs, undefined
from fastkern.errors import DeviceUnavailableError
from fastkern.kernels.triton.entry import TRANSPORTS
from tests.device.network_doubles import WHEELS, hide_machine, newer, write_files

BITCODE = {
    **{f"nvshmem/lib/libnvshmem_device_sm_{number}.bc": "" for number in (80, 89, 90, 100)},
    "nccl/lib/libnccl_device.bc": "",
}


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return write_files(hide_machine(monkeypatch, tmp_path), {**WHEELS, **BITCODE})


@pytest.mark.parametrize(
    ("arch", "found"), [("sm_80", 80), ("sm_86", 80), ("sm_90", 90), ("sm_120", 100)]
)
def test_bitcode_of_the_architecture(wheels: Path, arch: str, found: int) -> None:
    libraries = extern_libs("nvshmem", arch)
    assert list(libraries) == ["fastkern", "nvshmem"], "the wrapper comes first"
    assert libraries["nvshmem"] == str(wheels / f"nvshmem/lib/libnvshmem_device_sm_{found}.bc")
    assert extern_libs("nccl_gin", arch)["nccl_gin"] == str(wheels / "nccl/lib/libnccl_device.bc")
    for transport in ("nvshmem", "nccl_gin"):
        assert Path(extern_libs(transport, arch)["fastkern"]).name == f"{transport}.ll"


@pytest.mark.parametrize(
    ("transport", "removed", "said"),
    [
        ("nvshmem", "nvshmem/include/nvshmem.h", "no NVSHMEM in this environment's wheels"),
        ("nvshmem", "nvshmem/lib/*.bc", "no libnvshmem_device_sm_"),
        ("nccl_gin", "nccl/include/nccl_device.h", "no NCCL in this environment's wheels"),
        ("nccl_gin", "nccl/lib/*.bc", r"libnccl_device\.bc is missing"),
    ],
)
def test_a_missing_library(wheels: Path, transport: str, removed: str, said: str) -> None:
    for path in wheels.glob(removed):
        path.unlink()
    extra = {"nvshmem": "nvshmem", "nccl_gin": "gin"}[transport]
    for call in (
        lambda: extern_libs(transport, "sm_90"),
        lambda: check_triton_network(transport),
    ):
        with pytest.raises(DeviceUnavailableError, match=said) as caught:
            call()
        assert f"pip install 'fastkern[{extra}]'" in str(caught.value)


def test_an_architecture_that_is_too_old(wheels: Path) -> None:
    del wheels
    with pytest.raises(DeviceUnavailableError, match="no bitcode for sm_70"):
        extern_libs("nvshmem", "sm_70")


@pytest.mark.parametrize("transport", ["nvshmem", "nccl_gin"])
def test_a_release_that_cannot_link(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    del wheels
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    said = rf"Triton 3\.6\.0 is too old: the transport {transport} of backend triton needs 3\.7"
    for call in (
        lambda: check_triton_network(transport),
        lambda: extern_libs(transport, "sm_90"),
        lambda: compile_triton(
            "exchange",
            "cuda",
            "sm_90",
            128,
            {"TILE_BYTES": 1024, "TRANSPORT": TRANSPORTS[transport]},
        ),
    ):
        with pytest.raises(DeviceUnavailableError, match=said):
            call()


def test_transports_that_no_device_has() -> None:
    constants = {"TILE_BYTES": 1024, "TRANSPORT": TRANSPORTS["shared"]}
    with pytest.raises(ValueError, match="no transport 3 on devices"):
        compile_triton("exchange", "cuda", "sm_90", 128, constants)
    constants["TRANSPORT"] = TRANSPORTS["nvshmem"]
    with pytest.raises(ValueError, match="know no nvshmem on hip"):
        compile_triton("exchange", "hip", "gfx942", 128, constants)


def test_kernels_with_other_libraries_are_others(wheels: Path) -> None:
    """What a cache's key is made of."""
    before = triton_network.identity_of("nvshmem", "sm_90")
    assert before == triton_network.identity_of("nvshmem", "sm_90")
    newer(wheels / "nvshmem/lib/libnvshmem_device_sm_90.bc")
    assert before != triton_network.identity_of("nvshmem", "sm_90")


def test_what_is_left_undefined() -> None:
    text = (
        ".extern .func __assertfail\n(\n)\n;\n"
        ".extern .func  (.param .b32 func_retval0) vprintf\n(\n)\n;\n"
        ".extern .func  (.param .b64 func_retval0) fastkern_gin_add\n(\n"
        ".extern .shared .align 16 .b8 global_smem[];\n"
    )
    assert undefined(text) == ["fastkern_gin_add"]
