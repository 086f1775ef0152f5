"""The set-up of networks against the real Python bindings, which import without a GPU: what is
called exists with these parameters, and NCCL's records are laid out as in its headers."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

from fastkern.device import network_nvshmem
from fastkern.device.libraries import find_cuda_headers, find_nccl
from fastkern.device.network_gin import check_nccl
from fastkern.device.network_nvshmem import Nvshmem, check_nvshmem
from tests.device import fake_nccl


@pytest.fixture(scope="module")
def nccl() -> Any:
    return importlib.import_module("nccl.core")


# -- NCCL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NcclGinType", "NcclGinConnectionType", "WindowFlag"])
def test_numbers_of_nccl(nccl: Any, name: str) -> None:
    fake: EnumMeta = getattr(fake_nccl, name)
    real = getattr(nccl, name)
    for member in fake:
        assert int(getattr(real, member.name)) == int(member.value)


def test_calls_of_nccl(nccl: Any) -> None:
    """With the arguments that network_gin.py and the fake have."""
    comm, window = nccl.Communicator, nccl.RegisteredWindowHandle
    for function, arguments in (
        (nccl.mem_alloc, (1, 0)),
        (nccl.get_unique_id, ()),
        (nccl.UniqueId.from_bytes, (b"",)),
        (comm.init, (2, 0, None)),
        (comm.register_window, (None, None, nccl.WindowFlag.COLL_SYMMETRIC)),
        (comm.create_dev_comm, (None, None)),
        (comm.abort, (None,)),
        (window.get_peer_device_pointer, (None, 1)),
        (window.close, (None,)),
        (nccl.DevCommResource.close, (None,)),
    ):
        inspect.signature(function).bind(*arguments)
    for owner, name in (
        (comm, "team_lsa"),
        (comm, "properties"),
        (window, "handle"),
        (nccl.DevCommResource, "dev_comm"),
    ):
        assert isinstance(inspect.getattr_static(owner, name), property), name
    assert "n_ranks" in inspect.signature(nccl.NCCLTeam).parameters
    properties = importlib.import_module("nccl.core.communicator").NCCLCommProperties
    used = {"device_api_support", "available_gin_types", "gin_connection_type"}
    assert used <= set(inspect.signature(properties).parameters)
    assert importlib.import_module("cuda.core").Buffer.handle is not None


def test_requirements_arrive_in_the_record(nccl: Any) -> None:
    kinds, connection = nccl.NcclGinType, nccl.NcclGinConnectionType
    made = nccl.NCCLDevCommRequirements(
        gin_signal_count=0,
        gin_counter_count=1,
        gin_connection_type=connection.RAIL,
        gin_strong_signals_required=False,
        gin_va_signals_required=True,
        gin_type=kinds.PROXY,
    )._to_lowpp()
    assert (made.gin_counter_count, made.gin_connection_type) == (1, connection.RAIL)
    assert (made.gin_strong_signals_required, made.gin_va_signals_required) == (False, True)
    assert made.gin_type == kinds.PROXY
    assert made.version // 100 == 232  # the release that NCCL lays out ncclDevComm for


def test_a_unique_id_is_bytes(nccl: Any) -> None:
    content = bytes(range(128))
    assert bytes(nccl.UniqueId.from_bytes(content)) == content


def test_what_is_installed_goes_together() -> None:
    check_nccl()


LAYOUT = """
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <cstddef>
#include <cstdio>
int main() {
    std::printf("%zu\\n", sizeof(RECORD));
#define SHOW(name) std::printf(#name " %zu\\n", offsetof(RECORD, name));
    FIELDS
}
"""


@pytest.mark.parametrize(
    ("record", "dtype"),
    [("ncclDevComm", "dev_comm_dtype"), ("ncclDevCommRequirements", "dev_comm_requirements_dtype")],
)
def test_records_are_laid_out_as_in_the_headers(record: str, dtype: str, tmp_path: Path) -> None:
    """ncclDevComm is copied to the device as the binding has it, and read by kernels as the headers
    have it."""
    real = getattr(importlib.import_module("nccl.bindings.nccl"), dtype)
    folder, cuda = find_nccl(), find_cuda_headers()
    assert folder is not None
    assert cuda is not None
    header = "".join(path.read_text() for path in (folder / "include/nccl_device").rglob("*.h"))
    body = re.search(rf"struct {record} \{{.*?^\}}", header, re.DOTALL | re.MULTILINE)
    assert body is not None
    # The binding's "lsa_ll_a2a_slot_count" is lsaLLA2ASlotCount.
    words = {word.replace("_", "").lower(): word for word in re.findall(r"\w+", body[0])}
    fields = {name: words[name.replace("_", "")] for name in real.fields}
    source = LAYOUT.replace("RECORD", record)
    source = source.replace("FIELDS", " ".join(f"SHOW({name})" for name in fields.values()))
    (tmp_path / "layout.cc").write_text(source)
    includes = [f"-I{path}" for path in (folder / "include", *cuda)]
    program = tmp_path / "layout"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", *includes, str(tmp_path / "layout.cc")]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=120)
    size, *lines = subprocess.run(
        [str(program)], check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    assert int(size) == real.itemsize
    found = {name: int(at) for name, _, at in (line.partition(" ") for line in lines)}
    assert found == {fields[name]: real.fields[name][1] for name in real.fields}


# -- NVSHMEM ---------------------------------------------------------------------------------------


def test_calls_of_nvshmem() -> None:
    core = importlib.import_module("nvshmem.core")
    given = {"device": 0, "uid": 0, "rank": 0, "nranks": 1, "initializer_method": "uid"}
    inspect.signature(core.init).bind(**given)
    inspect.signature(core.get_unique_id).bind(empty=True)
    for name in ("STATUS_IS_INITIALIZED", "STATUS_FULL_MPG"):
        assert name in core.InitStatus.__members__
    bindings = importlib.import_module("nvshmem.bindings")
    used = set(re.findall(r"self\._bindings\.(\w+)", inspect.getsource(network_nvshmem)))
    assert {"malloc", "free", "ptr", "cumodule_init", "cumodule_finalize"} <= used
    types = {
        "malloc": "malloc(size_t size) -> intptr_t",
        "free": "free(intptr_t ptr) -> void",
        "ptr": "ptr(intptr_t dest, int pe) -> intptr_t",
        "cumodule_init": "cumodule_init(intptr_t module) -> int",
        "cumodule_finalize": "cumodule_finalize(intptr_t module) -> int",
        "my_pe": "my_pe() -> int",
        "n_pes": "n_pes() -> int",
        "init_status": "init_status() -> int",
    }
    for name in used - {"uniqueid_dtype"}:
        assert getattr(bindings, name).__doc__ == types[name]


def test_the_real_nvshmem_answers() -> None:
    """As far as it does without a GPU."""
    check_nvshmem()
    library = Nvshmem()
    assert library.initialized() is False
    assert library._bindings.uniqueid_dtype.itemsize == 128
    inspect.signature(library._cuda.Device).bind(0)
