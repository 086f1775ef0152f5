"""From a torch.distributed group to agreed facts about its ranks."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from .errors import AgreementError, FastkernError
from .heap import ProcessIdentity, own_identity

log = logging.getLogger("fastkern")
T = TypeVar("T")


@dataclass(frozen=True)
class RankInfo:
    """What each rank tells the others once.

    host: identity of the machine it runs on. global_rank: rank in the default group.
    local_world_size: ranks per server as the launcher said, if it did. agreement: everything that
    must be equal on all ranks, by name.
    """

    host: str
    global_rank: int
    local_world_size: int | None
    process: ProcessIdentity
    agreement: tuple[tuple[str, str], ...]
    error: Exception | None = None


def own_info(
    agreement: Mapping[str, object],
    local_world_size: int | None,
    error: Exception | None = None,
) -> RankInfo:
    """This rank's info."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    items = tuple((name, repr(value)) for name, value in agreement.items())
    return RankInfo(host, dist.get_rank(), local_world_size, own_identity(), items, error)


@runtime_checkable
class Meeting(Protocol):
    """What stands for a group among ranks that have a channel of their own (Entry)."""

    rank: int
    num_ranks: int

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, in group order."""


def rank_of(group: Any) -> int:
    """This rank's number in a torch.distributed group, or a Meeting."""
    return group.rank if isinstance(group, Meeting) else dist.get_rank(group)


def size_of(group: Any) -> int:
    """The number of ranks of a torch.distributed group, or a Meeting."""
    return group.num_ranks if isinstance(group, Meeting) else dist.get_world_size(group)


def gather(value: T, group: Any) -> list[T]:
    """Every rank's value, in order of a torch.distributed group, or of a Meeting."""
    if isinstance(group, Meeting):
        return group.gather_objects(value)
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def default_store() -> Any:
    """The store through which the processes of torch.distributed found one another.

    PyTorch has no public name for it, but builds every group of its own with it.
    """
    return dist.distributed_c10d._get_default_store()


def agreement_hash(infos: Sequence[RankInfo]) -> str:
    """A hash of what all ranks share; raises AgreementError, on every rank, where they differ."""
    for rank, info in enumerate(infos):
        if info.error is not None:
            raise type(info.error)(f"rank {rank}: {info.error}")
    first = infos[0].agreement
    for rank, info in enumerate(infos):
        for (name, expected), (_, value) in zip(first, info.agreement, strict=True):
            if value != expected:
                raise AgreementError(
                    f"ranks disagree on {name}: rank 0 has {expected}, rank {rank} has {value}"
                )
    return hashlib.sha256(repr(first).encode()).hexdigest()[:16]


def detect_servers(infos: Sequence[RankInfo]) -> tuple[int, int]:
    """(servers, ranks per server) from LOCAL_WORLD_SIZE and host names.

    Ranks of one server must be neighbours in the group and every server must have equally many;
    where that does not hold, each rank counts as a server of its own, which is right everywhere but
    balances nothing, and a warning says so.
    """
    keys = [
        (i.host, i.global_rank // i.local_world_size if i.local_world_size else 0) for i in infos
    ]
    distinct = list(dict.fromkeys(keys))
    per_server = len(keys) // len(distinct)
    if keys == [key for key in distinct for _ in range(per_server)]:
        log.info("%d servers x %d ranks, detected", len(distinct), per_server)
        return len(distinct), per_server
    log.warning(
        "ranks of a server are not neighbours, or servers differ in size: planning with %d servers "
        "of one rank; give servers= to say better",
        len(keys),
    )
    return len(keys), 1


def given_servers(servers: int, num_ranks: int) -> tuple[int, int]:
    """(servers, ranks per server) from the caller's number. Raises ValueError."""
    if isinstance(servers, bool) or not hasattr(servers, "__index__"):
        raise TypeError(f"servers must be a whole number, not {servers!r}")
    if servers < 1 or num_ranks % servers:
        raise ValueError(f"servers={servers!r} does not divide the group's {num_ranks} ranks")
    return servers, num_ranks // servers


def check_servers(hosts: Sequence[str], servers: int) -> None:
    """Raise FastkernError where ranks of one server are on several hosts. hosts: of each rank."""
    per_server = len(hosts) // servers
    for server in range(servers):
        names = set(hosts[server * per_server :][:per_server])
        if len(names) > 1:
            raise FastkernError(
                f"the ranks of server {server}, {per_server} of {len(hosts)}, are on {len(names)} "
                "hosts: servers= must be a multiple of the number of hosts"
            )


def group_timeout_s(group: Any) -> float:
    """The group's own timeout in seconds, 30 minutes where it does not tell."""
    try:
        backend = group._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 1800.0
