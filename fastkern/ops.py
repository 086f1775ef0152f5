"""The operations as functions of a process group, with a communicator made on first use."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .communicator import Communicator
from .work import Work

_communicators: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()
_creations: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def init(group: Any = None, **options: Any) -> Communicator:
    """Make the communicator that later calls on `group` use, with options of one's own.

    group: a torch.distributed group, by default the default one. options: as for Communicator
    (servers=, transport=, policy=, ...). Collective: every rank of the group calls it. Replaces,
    and closes, one made before.
    """
    group = dist.group.WORLD if group is None else group
    with _creation_of(group):
        made = Communicator(group, **options)
        with _lock:
            old = _communicators.pop(group, None)
            _communicators[group] = made
    if old is not None:
        old.close()
    return made


def communicator_of(group: Any = None) -> Communicator:
    """The group's communicator, made now if there is none yet (collective then)."""
    group = dist.group.WORLD if group is None else group
    with _lock:
        found = _communicators.get(group)
    if found is not None:
        return found
    with _creation_of(group):  # of several threads one makes it
        with _lock:
            found = _communicators.get(group)
        return found if found is not None else init(group)


def _creation_of(group: Any) -> Any:
    """The lock that is held while a group's communicator is made."""
    with _lock:
        return _creations.setdefault(group, threading.RLock())


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    num_blocks: int | None = None,
) -> Work | None:
    """As torch.distributed.all_to_all_single, for tensors of any dtype; see Communicator.

    A rank outside `group` gets a warning and None, as in PyTorch.
    """
    if dist.get_rank(group) < 0:
        warnings.warn("all_to_all_single on a group that this rank is not part of", stacklevel=2)
        return None
    return communicator_of(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op, num_blocks=num_blocks
    )


all_to_all_FAST = all_to_all_single  # noqa: N816 (the name the FAST paper uses)


def shutdown() -> None:
    """Close every communicator that these functions made."""
    with _lock:
        made = list(_communicators.values())
        _communicators.clear()
    for communicator in made:
        communicator.close()
