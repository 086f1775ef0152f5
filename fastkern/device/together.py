"""Steps that all ranks of a group take together, and fail together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import bootstrap
from ..errors import FastkernError, HeapMemoryError

log = logging.getLogger("fastkern")

T = TypeVar("T")


class FollowedError(FastkernError):
    """A step was given up because another rank had failed in it, whose error is the one to tell."""


@dataclass(frozen=True)
class _Answer:
    """What a rank's step returned, or why it failed; memory: there was too little; followed: only
    because another rank had failed."""

    value: Any
    error: str = ""
    memory: bool = False
    followed: bool = False


def together(group: Any, what: str, step: Callable[[], T]) -> list[T]:
    """Take a step on every rank; every rank's result in group order, or one error on all of them.

    No rank returns before all have taken the step. what: the step, for the error's text. Raises
    HeapMemoryError where the first rank that failed had too little memory, else FastkernError.
    """
    failure: Exception | None = None
    try:
        answer = _Answer(step())
    except Exception as error:
        failure = error
        text, memory = str(error) or repr(error), isinstance(error, MemoryError)
        answer = _Answer(None, text, memory, isinstance(error, FollowedError))
    answers = bootstrap.gather(answer, group)
    failed = [(given.followed, rank) for rank, given in enumerate(answers) if given.error]
    if failed:
        _, rank = min(failed)
        kind = HeapMemoryError if answers[rank].memory else FastkernError
        raise kind(f"{what}, rank {rank}: {answers[rank].error}") from failure
    return [given.value for given in answers]


def logged(what: str, step: Callable[[], object]) -> None:
    """A step of cleaning up: where it fails, go on. An error of one rank alone would leave the
    others waiting for its next step, and hide what the cleaning up is for."""
    try:
        step()
    except FastkernError as error:
        log.warning("%s: %s", what, error)
