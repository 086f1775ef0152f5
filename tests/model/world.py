"""All ranks, and the scheduler that picks at random who does the next step."""

from __future__ import annotations

from functools import partial
from random import Random

from .memory import Fault, Heap
from .network import Network, UnderWay
from .rank import Actor, Rank, Steps
from .scenario import Scenario, Setting

MOST_STEPS = 1_000_000


class World:
    def __init__(self, scenario: Scenario, random: Random) -> None:
        self.scenario, self.random = scenario, random
        self.setting: Setting = scenario.setting
        self.network = Network(random, scenario.patience)
        layout = scenario.calls[0].plan.layout
        needs = [call.plan.heap_rows for call in scenario.calls]
        at_first = needs[0] if self.setting.grows else tuple(map(max, *needs, needs[0]))
        self.ranks: list[Rank] = []
        for number in range(layout.num_ranks):
            heap = Heap(number, (at_first[0], at_first[1], at_first[2]))
            rank = Rank(
                number,
                [0] * layout.num_slots(),
                heap,
                layout.num_ranks,
                UnderWay(_nothing),
                UnderWay(_nothing),
            )
            rank.puts.at_end = rank.signals.at_end = partial(self.message_ended, rank)
            self.ranks.append(rank)
        self.awake: list[Actor] = []
        self.num_steps = 0
        self.expiries_left = self.setting.expiries if self.setting.stop else 0

    def start(self, rank: Rank, steps: Steps) -> None:
        self.awake.append(Actor(rank, steps))

    def wake(self, rank: Rank) -> None:
        """Something has changed in the rank's memory: all its actors look again."""
        if rank.asleep:
            self.awake += rank.asleep
            rank.asleep.clear()

    def message_ended(self, sender: Rank) -> None:
        for rank in self.ranks if sender.stopped else (sender,):
            self.wake(rank)

    def play(self) -> None:
        """Until all ranks are through; raises `Fault`."""
        random, awake, pending = self.random.random, self.awake, self.network.pending
        slow, slowness = self.scenario.slow, self.scenario.slowness
        network_share = self.scenario.network_share
        stop_at = int(random() ** 2 * 3000) if self.setting.stop else -1
        expire_at = int(random() ** 2 * 3000) if self.setting.stop else -1
        while not all(rank.finished for rank in self.ranks):
            # A hundred steps between looks at whether all is over.
            for _ in range(100):
                self.num_steps += 1
                if self.num_steps > MOST_STEPS:
                    raise Fault("hang", "steps without end; " + self.describe())
                if self.num_steps == stop_at:
                    self.stop(self.ranks[int(random() * len(self.ranks))])
                if self.num_steps == expire_at:
                    self.expire([self.ranks[int(random() * len(self.ranks))]])
                if pending and (not awake or random() < network_share):
                    self.network.deliver_one()
                elif awake:
                    at = int(random() * len(awake))
                    actor = awake[at]
                    if actor.rank.number in slow and random() < slowness:
                        continue
                    self.step(at, actor)
                elif all(rank.finished for rank in self.ranks):
                    break
                else:
                    self.nothing_moves()

    def step(self, at: int, actor: Actor) -> None:
        sleeps = next(actor.steps, None)
        if sleeps is False:
            return
        # The step may have woken or stopped others: the list has moved, or the actor is gone.
        if at >= len(self.awake) or self.awake[at] is not actor:
            if actor not in self.awake:
                return
            at = self.awake.index(actor)
        self.awake[at] = self.awake[-1]
        self.awake.pop()
        if sleeps:
            actor.rank.asleep.append(actor)

    # -- the end of patience ---

    def stop(self, rank: Rank) -> None:
        """The rank's process is gone; what it has sent still arrives."""
        if rank.finished:
            return
        if rank.deadline_passed and self.setting.expiries < len(self.ranks):
            return  # it may be telling the others, and not all of them would find out by themselves
        rank.stopped = True
        rank.asleep.clear()
        self.network.lose(rank.number)
        self.awake[:] = [actor for actor in self.awake if actor.rank is not rank]
        for other in self.ranks:
            self.wake(other)

    def nothing_moves(self) -> None:
        """Time passes: one or two ranks reach their deadlines, nearly at once; or it is a hang."""
        waiting = [rank for rank in self.ranks if not rank.finished and not rank.deadline_passed]
        if self.expiries_left <= 0 or not waiting:
            raise Fault("hang", self.describe())
        count = min(self.random.randint(1, 2), len(waiting), self.expiries_left)
        self.expire(self.random.sample(waiting, count))

    def expire(self, ranks: list[Rank]) -> None:
        """From now on these ranks give up when they next find nothing to do."""
        for rank in ranks:
            self.expiries_left -= 1
            rank.deadline_passed = True
            self.wake(rank)

    def give_up(self, rank: Rank) -> Steps:
        """A deadline has passed: every rank is told to leave, and who says so."""
        rules, ranks = self.setting.rules, self.ranks
        word = rank.number + 1
        if rules.abort_one_origin:
            home = ranks[0]
            home.abort = home.abort or word
            word = home.abort
            self.wake(home)
            yield False
        told = [rank, *ranks]
        if not rules.abort_to_all:
            told = [rank]
        for other in told:
            other.abort = other.abort or word  # a compare-and-swap
            self.wake(other)
            yield False

    def describe(self) -> str:
        lines = []
        for rank in self.ranks:
            if not rank.finished:
                lines.append(
                    f"rank {rank.number} in call {rank.calls_done}, tickets {rank.tickets}"
                )
        return "; ".join(lines)


def _nothing() -> None:
    pass
