"""What is on its way between ranks: late at random and in no order, a put's flag after its data."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Step = Callable[[], None]


class UnderWay:
    """How many messages of one kind a rank has sent that have not ended; `at_end` follows each end.

    What goes to a rank that has stopped never ends: it is lost, and counts as under way for ever.
    """

    __slots__ = ("at_end", "count", "lost")

    def __init__(self, at_end: Step) -> None:
        self.count = 0
        self.lost = 0
        self.at_end = at_end


class Message:
    """Steps that happen one after the other, at any later time. A patient one is seldom picked."""

    __slots__ = ("patient", "steps", "target", "under_way")

    def __init__(self, target: int, steps: list[Step], under_way: UnderWay, patient: bool) -> None:
        self.target = target
        self.steps = steps
        self.under_way = under_way
        self.patient = patient


class Network:
    def __init__(self, random: Random, patience: float) -> None:
        self.random = random
        self.patience = patience  # share of messages that are patient
        self.pending: list[Message] = []
        self.gone: set[int] = set()

    def send(self, target: int, under_way: UnderWay, *steps: Step) -> None:
        under_way.count += 1
        if target in self.gone:
            under_way.lost += 1
            return
        patient = self.random.random() < self.patience
        self.pending.append(Message(target, list(steps), under_way, patient))

    def lose(self, target: int) -> None:
        """Nothing reaches this rank any more."""
        for message in self.pending:
            if message.target == target:
                message.under_way.lost += 1
        self.pending[:] = [message for message in self.pending if message.target != target]
        self.gone.add(target)

    def deliver_one(self) -> None:
        """Takes the next step of a message picked at random."""
        pending = self.pending
        at = int(self.random.random() * len(pending))
        message = pending[at]
        if message.patient and self.random.random() < 0.95:
            return
        message.steps.pop(0)()
        if not message.steps:
            pending[at] = pending[-1]
            pending.pop()
            message.under_way.count -= 1
            message.under_way.at_end()
