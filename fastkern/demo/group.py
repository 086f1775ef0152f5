"""The process group that a rank of the demos joins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fastkern

_GROUP_TIMEOUT = timedelta(seconds=120)


@contextmanager
def rank_group(rank: int, num_ranks: int, folder: Path) -> Iterator[None]:
    """Be a rank of the default group, on gloo and with one thread, until the block ends.

    folder: where the ranks meet. Communicators of fastkern.init are closed at the end.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=_GROUP_TIMEOUT,
    )
    try:
        yield
        dist.barrier()
    finally:
        fastkern.shutdown()
        dist.destroy_process_group()
