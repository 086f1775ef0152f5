"""Running a benchmark body on processes as ranks, and collecting what each returns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(num_ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """body(rank, num_ranks, *args) on `num_ranks` gloo processes; their results in rank order."""
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(_enter, args=(num_ranks, folder, results, body, args), nprocs=num_ranks)
        return [results[rank] for rank in range(num_ranks)]


def _enter(
    rank: int, num_ranks: int, folder: str, results: Any, body: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    try:
        results[rank] = body(rank, num_ranks, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
