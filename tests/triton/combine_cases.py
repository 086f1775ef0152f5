"""Combines whose kernels are interpreted, compared with the host's. Bodies for ranks.

Route and dispatch run on the host target, so that what a combine is given is right.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fastkern import Communicator
from fastkern.device.host_driver import HostDriver, HostFunction
from fastkern.device.host_stream import Work
from fastkern.device.interpret import interpret
from fastkern.device.memory import release_leftovers
from fastkern.kernels.triton import rounding
from tests.device.communicators import on_device
from tests.moe_cases import Case, Data
from tests.moe_checks import dispatch_options, payload, same_numbers

# Whose sums overflow, underflow, meet or are not numbers; 1e30: of no 16-bit type but bfloat16.
_SPECIAL = (float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 6e-8, -6e-8, 1e-40, 65504.0, 1e30)


class CombineDriver(HostDriver):
    """The CPU as a device whose combine is the one in Triton. names: of the kernels that ran."""

    def __init__(self, tile_bytes: int) -> None:
        super().__init__(most_lanes=2)
        self.names: set[str] = set()
        self._constants = {"TILE_BYTES": tile_bytes}

    def _work_of(self, function: HostFunction, grid: int, num_lanes: int, arguments: bytes) -> Work:
        if not function.name.startswith("fastkern_combine"):
            return super()._work_of(function, grid, num_lanes, arguments)
        self.names.add(function.name)
        return lambda: interpret(function.name, grid, arguments, self._constants)


def _check_alignment() -> AbstractContextManager[Any]:
    """That addresses are multiples of what the compiler is told, which the interpreter ignores."""
    real = rounding._pointers

    def checked(address: Any, column: Any, number_type: Any, alignment: Any) -> Any:
        assert int(address.handle.data.item()) % int(alignment) == 0, "a row is not aligned"
        return real(address, column, number_type, alignment)

    return patch.object(rounding, "_pointers", checked)


@contextmanager
def interpreted_combine(
    servers: int, tile_bytes: int, options: dict[str, Any]
) -> Iterator[tuple[Communicator, CombineDriver]]:
    """A communicator of all ranks on such a device; afterwards nothing of it may be left."""
    driver = CombineDriver(tile_bytes)
    with _check_alignment(), Communicator(**on_device(driver, servers, options)) as comm:
        yield comm, driver
    dist.barrier()  # the others have let go of this rank's memory
    gc.collect()
    assert release_leftovers() == 0
    left = driver.leftovers()
    driver.close()
    assert left == []


class Combine(NamedTuple):
    """A case, and what it does not say. bias_dtype: None: that of the sums. shifted: what begins
    one value past a multiple of 16 bytes, "bias" or "rows": expert outputs and results."""

    case: Case
    bias_dtype: torch.dtype | None = None
    shifted: str = ""


def _planted(values: Tensor, seed: int) -> Tensor:
    """Special values in a fifth of a tensor; NaNs stay."""
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.rand(values.shape, generator=rng) < 0.2
    which = torch.randint(len(_SPECIAL), values.shape, generator=rng)
    special = torch.tensor(_SPECIAL, dtype=torch.float64)[which].to(values.dtype)
    return torch.where(chosen & ~values.isnan(), special, values)


def _shifted(values: Tensor) -> Tensor:
    """The same, at an address that is one value past a multiple of 16 bytes."""
    memory = torch.zeros(values.numel() + 1, dtype=values.dtype)
    assert memory.data_ptr() % 16 == 0
    moved = memory[1:].view(values.shape)
    moved.copy_(values)
    return moved


def _sums(comm: Communicator, data: Data, asked: Combine) -> Tensor:
    case, rank = data.case, comm.rank
    weights = None if data.weights is None else data.weights[rank]
    idx = data.routing.topk_idx[rank].to(case.idx_dtype)
    options = dispatch_options(data)
    _, _, _, handle = comm.dispatch(payload(data.inputs[rank]), idx, weights, **options)
    outs = _planted(data.expert_outs[rank], rank)
    bias = None
    if data.biases is not None:
        drawn = data.biases[rank]
        bias = _planted(drawn, 99).to(asked.bias_dtype or drawn.dtype)
        if asked.shifted == "bias":
            bias = _shifted(bias)
    out = torch.empty(data.routing.num_tokens(rank), case.sum_width, dtype=outs.dtype)
    if asked.shifted == "rows":
        outs, out = _shifted(outs), _shifted(out)
    row_weights = None if data.row_weights is None else _planted(data.row_weights[rank], rank)
    given: dict[str, Any] = {"weights": row_weights, "bias": bias, "wire_dtype": case.wire_dtype}
    return comm.combine(outs, handle, out=out, **given)


def same_as_host(
    rank: int, ranks: int, servers: int, tile_bytes: int, options: dict[str, Any], asked: Any
) -> tuple[set[str], int]:
    """Combines on both, byte for byte but for the payloads of NaNs. Returns the kernels that were
    interpreted, and how many sums were no numbers."""
    del rank
    num_nan = 0
    interpreted = interpreted_combine(servers, tile_bytes, options)
    with interpreted as (comm, driver), Communicator(servers=servers) as host:
        for one in asked:
            data = Data(one.case, servers, ranks)
            got, right = _sums(comm, data, one), _sums(host, data, one)
            same_numbers(got, right, f"{one.case.name}: sums of rank {comm.rank}")
            num_nan += int(right.isnan().sum())
        gc.collect()
    return driver.names, num_nan
