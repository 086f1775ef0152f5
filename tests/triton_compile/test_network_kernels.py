"""The kernels in Triton between servers, compiled and linked with the libraries: nothing undefined,
nothing spilled, numbers as the libraries' headers have them, one thread where there must be one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from fastkern.device.compile_triton import options_of
from fastkern.device.libraries import find_nccl, find_nvshmem
from fastkern.device.triton_network import OLDEST, extern_libs, undefined, wrapper_of
from fastkern.kernels.triton.entry import TRANSPORTS, kernel_of

WARPS = 8
links = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST,
    reason="this Triton cannot read the libraries' bitcode, and says so: tests/device",
)
ONE_THREAD = {
    "nvshmem": ("signal", "quiet"),
    "nccl_gin": ("put", "add", "set"),
}
SYMBOLS = ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d")


def ptx_of(name: str, transport: str, arch: int, folder: Path) -> str:
    target = GPUTarget("cuda", arch, 32)
    constants = {"TILE_BYTES": 16384, "TRANSPORT": TRANSPORTS[transport]}
    signature = {"ranks": "i64", "num_ranks": "i32", "blocks_per_rank": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(
        fn=kernel_of(name, between_servers=True), signature=signature, constexprs=constants
    )
    options = options_of(target, WARPS, libraries=extern_libs(transport, f"sm_{arch}"))
    with knobs.cache.scope():
        knobs.cache.dir = str(folder / "cache")
        text: str = triton.compile(source, target=target, options=options).asm["ptx"]
    return text


def spills_of(ptx: str, arch: int, folder: Path) -> list[int]:
    """Bytes of spill stores and loads of every function, as ptxas says."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    tools = [knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", None)]
    suffix = "a" if arch >= 90 else ""
    for tool in filter(None, tools):  # of two, one knows the PTX
        command = [tool.path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(path)]
        said = subprocess.run(
            [*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True
        )
        if said.returncode == 0:
            found = re.findall(r"(\d+) bytes spill (?:stores|loads)", said.stderr + said.stdout)
            return [int(number) for number in found]
    raise AssertionError(said.stderr)


def function_of(ptx: str, name: str) -> str:
    """A function's body."""
    found = re.search(rf"^\.func[^{{;]*\b{name}\([^{{;]*\{{(.*?)^\}}", ptx, re.M | re.S)
    assert found, f"{name} is not a function of its own"
    return found[1]


@links
@pytest.mark.parametrize(
    ("name", "transport", "capability"),
    [
        ("fastkern_exchange", "nccl_gin", 80),
        ("fastkern_exchange", "nccl_gin", 100),
        ("fastkern_exchange", "nvshmem", 90),
        ("fastkern_dispatch", "nccl_gin", 90),
        ("fastkern_combine", "nvshmem", 90),
    ],
)
def test_a_kernel(name: str, transport: str, capability: int, tmp_path: Path) -> None:
    ptx = ptx_of(name, transport, capability, tmp_path)
    assert undefined(ptx) == []
    spills = spills_of(ptx, capability, tmp_path)
    assert spills
    assert not any(spills)
    prefix = {"nvshmem": "fastkern_nvshmem_", "nccl_gin": "fastkern_gin_"}[transport]
    for wrapper in ONE_THREAD[transport]:
        body = function_of(ptx, prefix + wrapper)
        tid = re.search(r"mov\.u32\s+(%r\d+), %tid\.x", body)
        assert tid, f"{wrapper}: every thread calls the library"
        assert re.search(rf"setp\.\w+\.[bsu]32\s+%p\d+, {re.escape(tid[1])}, 0;", body), wrapper
        assert re.search(r"bar\.warp\.sync", body), f"{wrapper}: its warp does not meet again"
    for symbol in SYMBOLS if transport == "nvshmem" else ():
        assert re.search(rf"^\.visible \.const .*\b{symbol}\[", ptx, re.M), symbol
    order_of_puts(ptx, prefix)


def order_of_puts(ptx: str, prefix: str) -> None:
    """Nothing of the block is on its way past a barrier when a put begins: before each call of it,
    in its basic block or one before, stands one. The flag is the put's own: no signal follows."""
    kernel = ptx[ptx.index(".entry") :].splitlines()
    calls = [k for k, line in enumerate(kernel) if f"{prefix}put," in line]
    assert calls
    for k in calls:
        before = [line for line in kernel[:k] if "bar.sync" in line]
        assert before, "no barrier before a put"
        after = " ".join(kernel[k : k + 40])
        assert f"{prefix}signal," not in after
        assert f"{prefix}add," not in after


def test_numbers_of_nvshmem() -> None:
    folder = find_nvshmem()
    assert folder is not None
    header = (folder / "include/device_host_transport/nvshmem_constants.h").read_text()
    order = re.findall(r"\bNVSHMEM_CMP_(\w+)", header[header.index("NVSHMEM_CMP_EQ = 0") :])
    text = wrapper_of("nvshmem").read_text()
    assert f"@nvshmem_uint64_test(ptr %flag.p, i32 {order.index('GE')}, i64 %stamp)" in text
    header = (folder / "include/device_host_transport/nvshmem_common_transport.h").read_text()
    assert "NVSHMEM_SIGNAL_SET = 9, NVSHMEM_SIGNAL_ADD = 10" in header
    wire = (wrapper_of("nvshmem").parent / "wire_nvshmem.py").read_text()
    assert "_SET = tl.constexpr(9)" in wire
    assert "_ADD = tl.constexpr(10)" in wire
    assert re.search(r"@nvshmemx_putmem_signal_nbi_block\(.*i64 %stamp, i32 9, i32 %pe\.i\)", text)


def test_numbers_of_nccl() -> None:
    folder = find_nccl()
    assert folder is not None
    headers = folder / "include/nccl_device"
    common = (headers / "gin/gin_device_common.h").read_text()
    kinds = re.findall(
        r"NCCL_GIN_SIGNAL_TYPE_(\w+)", common[common.index("enum ncclGinSignalType") :]
    )
    assert kinds.index("VA") == 1
    assert kinds.index("NONE") == 0
    host = (headers / "gin/gin_device_host_common.h").read_text()
    assert re.search(r"ncclGinSignalInc = 0,\s*ncclGinSignalAdd,", host)
    types = dict(re.findall(r"NCCL_GIN_TYPE_(\w+) = (\d+)", (headers / "core.h").read_text()))
    usable = sum(1 << int(types[kind]) for kind in ("PROXY", "GDAKI", "GPI"))
    text = wrapper_of("nccl_gin").read_text()
    assert f"@ncclGin_C_init(ptr %gin, i32 {usable}," in text
    gin = (headers / "gin.h").read_text()
    assert "ncclGinSegmentTypeDevice = 0," in gin
    for function in ("ncclGinPut_v3", "ncclGinPutValue_v3", "ncclGinSignal_v3"):
        declared = re.search(rf"\b{function}\((.*?)\);", gin, re.S)
        ours = re.search(rf"^declare void @{function}\((.*)\)$", text, re.M)
        assert declared, function
        assert ours, function
        assert len(declared[1].split(",")) == len(ours[1].split(",")), function
