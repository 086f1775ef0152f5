"""NVSHMEM and rocSHMEM behind the interface that network_shmem.py has of an OpenSHMEM: bindings
that note what they are called with, and what is said where one is missing."""

from __future__ import annotations

import ctypes
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fastkern import DeviceUnavailableError
from fastkern.device.network_nvshmem import Nvshmem, check_nvshmem
from fastkern.device.network_rocshmem import Rocshmem, check_rocshmem
from fastkern.device.networks import KINDS
from fastkern.device.sources import NETWORKS


class Noting:
    """A module: notes calls, and returns what it was told to."""

    def __init__(self, **answers: Any) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.noted.append((name, *arguments, *named.items()))
            answer = self._answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class UniqueId:
    """Of NVSHMEM: a record at an address."""

    def __init__(self, content: bytes) -> None:
        self._raw = ctypes.create_string_buffer(content, 128)
        self.ptr = ctypes.addressof(self._raw)


def nvshmem_with(**answers: Any) -> tuple[Nvshmem, Any, Any]:
    status = SimpleNamespace(STATUS_IS_INITIALIZED=2, STATUS_FULL_MPG=4)
    core = Noting(init=None, get_unique_id=UniqueId(bytes(range(128))))
    core.InitStatus = status
    bindings = Noting(**answers)
    bindings.uniqueid_dtype = np.dtype("V128")
    cuda = SimpleNamespace(Device=lambda number: f"device {number}")
    return Nvshmem((core, bindings, cuda)), core, bindings


@pytest.mark.parametrize(("status", "started"), [(0, False), (1, False), (2, True), (4, True)])
def test_whether_nvshmem_runs(status: int, started: bool) -> None:
    library, _, _ = nvshmem_with(init_status=status)
    assert library.initialized() is started


def test_nvshmem_starts_with_the_first_ranks_id() -> None:
    library, core, _ = nvshmem_with()
    assert library.unique_id() == bytes(range(128))
    library.init(3, 1, 4, bytes(range(128, 256)))
    assert core.noted[:2] == [("get_unique_id",), ("get_unique_id", ("empty", True))]
    name, device, (key, made), *others = core.noted[2]
    assert (name, device, key) == ("init", ("device", "device 3"), "uid")
    assert ctypes.string_at(made.ptr, 128) == bytes(range(128, 256))
    assert others == [("rank", 1), ("nranks", 4), ("initializer_method", "uid")]


def test_nvshmem_memory_and_modules() -> None:
    answers = {"malloc": 512, "free": None, "ptr": 0, "my_pe": 1, "n_pes": 4}
    library, _, bindings = nvshmem_with(**answers, cumodule_init=0, cumodule_finalize=0)
    assert (library.malloc(64), library.pointer(512, 2)) == (512, 0)
    assert (library.my_pe(), library.n_pes()) == (1, 4)
    library.free(512)
    library.module_init(77)
    library.module_finalize(77)
    assert bindings.noted == [
        ("malloc", 64),
        ("ptr", 512, 2),
        ("my_pe",),
        ("n_pes",),
        ("free", 512),
        ("cumodule_init", 77),
        ("cumodule_finalize", 77),
    ]


@pytest.mark.parametrize("name", ["init", "finalize"])
def test_a_module_that_nvshmem_refuses(name: str) -> None:
    library, _, _ = nvshmem_with(cumodule_init=7, cumodule_finalize=7)
    with pytest.raises(RuntimeError, match=f"nvshmemx_cumodule_{name} returned 7"):
        getattr(library, f"module_{name}")(1)


def rocshmem_with(**answers: Any) -> tuple[Rocshmem, Noting]:
    binding = Noting(**{f"rocshmem_{name}": answer for name, answer in answers.items()})
    binding._answers["hip_device_synchronize"] = None
    return Rocshmem(binding), binding


def test_rocshmem() -> None:
    answers = {"get_uniqueid": b"id", "init_attr": None, "my_pe": 1, "n_pes": 4, "free": None}
    library, binding = rocshmem_with(**answers, malloc=512, ptr=0, hipmodule_init=0)
    assert not library.initialized()
    assert library.unique_id() == b"id"
    library.init(3, 1, 4, b"id of rank 0")
    assert library.initialized()
    assert (library.malloc(64), library.pointer(512, 2)) == (512, 0)
    assert (library.my_pe(), library.n_pes()) == (1, 4)
    library.free(512)
    library.module_init(77)
    library.module_finalize(77)
    assert binding.noted == [
        ("rocshmem_get_uniqueid",),
        ("rocshmem_init_attr", 1, 4, b"id of rank 0"),
        ("rocshmem_malloc", 64),
        ("rocshmem_ptr", 512, 2),
        ("rocshmem_my_pe",),
        ("rocshmem_n_pes",),
        ("rocshmem_free", 512),
        ("rocshmem_hipmodule_init", 77),
        ("hip_device_synchronize",),
    ]


def test_rocshmem_without_memory_or_with_a_bad_module() -> None:
    library, _ = rocshmem_with(malloc=RuntimeError("rocshmem_malloc failed"), hipmodule_init=1)
    assert library.malloc(64) == 0
    with pytest.raises(RuntimeError, match="rocshmem_hipmodule_init returned 1"):
        library.module_init(77)


def test_every_network_has_its_file() -> None:
    assert {name: kind.target for name, kind in KINDS.items()} == NETWORKS
    for kind in KINDS.values():
        for call in (kind.check, kind.make):
            module, name = call.args  # type: ignore[attr-defined]
            assert callable(getattr(importlib.import_module(f"fastkern.device.{module}"), name))


# -- bindings that are missing ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "module", "said"),
    [
        ("nccl_gin", "nccl.core", r"cannot import nccl.core .*`pip install 'fastkern\[gin\]'`"),
        ("nvshmem", "nvshmem.core", r"nvshmem4py .*`pip install 'fastkern\[nvshmem\]'`"),
        ("rocshmem", "rocshmem4py", r"rocshmem4py .* built against the rocSHMEM"),
    ],
)
def test_a_missing_binding(transport: str, module: str, said: str) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == module:
            raise ImportError(f"no {name} here")
        return real(name, package)

    with (
        mock.patch.object(importlib, "import_module", without),
        pytest.raises(DeviceUnavailableError, match=said) as caught,
    ):
        KINDS[transport].check()
    assert f"the transport {transport} cannot be set up: cannot import" in str(caught.value)
    assert f"no {module} here" in str(caught.value)


def test_a_library_that_does_not_load() -> None:
    modules = {"nvshmem.core": Noting(get_version=RuntimeError("no libnvshmem_host.so.3"))}
    with (
        mock.patch.object(importlib, "import_module", lambda name: modules.get(name)),
        pytest.raises(DeviceUnavailableError, match=r"no libnvshmem_host.so.3. `pip install"),
    ):
        check_nvshmem()
    with (
        mock.patch.object(importlib, "import_module", side_effect=OSError("librocshmem.so")),
        pytest.raises(DeviceUnavailableError, match=r"librocshmem\.so"),
    ):
        check_rocshmem()
