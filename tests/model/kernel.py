"""The persistent kernel: blocks that claim items from six queues, run them, and end the call."""

from __future__ import annotations

from .items import PUT, QUEUE_NAMES, VALUE_BITS, Copy, Item, Signal
from .memory import INPUT, OUTPUT, Fault
from .network import Network
from .rank import Kernel, Rank, Steps
from .scenario import Setting
from .world import World


class Block:
    """One block of one launch. `steps` is its life; each yield lets anything else happen."""

    def __init__(self, world: World, rank: Rank, kernel: Kernel, index: int) -> None:
        self.world, self.rank, self.kernel, self.index = world, rank, kernel, index
        self.setting: Setting = world.setting
        self.rules = world.setting.rules
        self.network: Network = world.network
        self.queues = kernel.plan.queues[rank.number]

    def steps(self) -> Steps:
        if self.index == 0:
            for post in self.kernel.plan.posts[self.rank.number]:
                self.signal(post)
                yield False
        if self.setting.claim == "ready":
            yield from self.claim_when_ready()
        else:
            yield from self.claim_and_wait(help_others=self.setting.claim == "help")
        yield from self.leave()

    # -- claiming ---

    def head(self, queue: int) -> Item | None:
        ticket = self.rank.tickets[queue]
        return self.queues[queue][ticket] if ticket < len(self.queues[queue]) else None

    def claim_when_ready(self) -> Steps:
        """The kernel's discipline: take only a head that can run, the earliest of those."""
        rank = self.rank
        while not rank.abort:
            heads = [item for queue in range(len(QUEUE_NAMES)) if (item := self.head(queue))]
            if not heads:
                return
            runnable = [item for item in heads if self.can_run(item)]
            if not runnable:
                if rank.deadline_passed:
                    yield from self.world.give_up(rank)
                else:
                    yield True
                continue
            item = min(runnable, key=lambda one: one.time)
            ticket = rank.tickets[item.queue]
            yield False  # between the look and the compare-and-swap
            if self.head(item.queue) is item and rank.tickets[item.queue] == ticket:
                self.claim(item)
                yield from self.run(item)

    def claim_and_wait(self, help_others: bool) -> Steps:
        """Items are claimed first and awaited afterwards, each block from its preferred queue on.

        With `help_others`: before it waits, a block claims what is unclaimed of smaller plan time.
        """
        held: list[Item] = []
        preferred = [(self.index + PUT + k) % len(QUEUE_NAMES) for k in range(len(QUEUE_NAMES))]
        while not self.rank.abort:
            if not held:
                head = next((item for queue in preferred if (item := self.head(queue))), None)
                if head is None:
                    return
                self.claim(head)
                held.append(head)
            item = held[-1]
            if self.can_run(item):
                yield from self.run(item)
                held.pop()
                continue
            earlier = None
            if help_others and self.rules.help_before_wait:
                heads = (self.head(queue) for queue in range(len(QUEUE_NAMES)))
                earlier = next((other for other in heads if other and other.time < item.time), None)
            if earlier:
                self.claim(earlier)
                held.append(earlier)
                yield False
            elif self.rank.deadline_passed:
                yield from self.world.give_up(self.rank)
            else:
                yield True

    def claim(self, item: Item) -> None:
        item.claims += 1
        if item.claims > 1:
            raise Fault("claimed twice", item.label)
        self.rank.tickets[item.queue] += 1
        self.world.wake(self.rank)

    def can_run(self, item: Item) -> bool:
        flags, rules = self.rank.flags, self.rules
        for slot, value, rule in item.waits:
            if rule and not getattr(rules, rule):
                continue
            stamp = self.stamp(value)
            if flags[slot] < stamp or (flags[slot] != stamp and not rules.wait_at_least):
                return False
        return True

    def stamp(self, value: int) -> int:
        return self.kernel.epoch << VALUE_BITS | value if self.rules.epoch_in_flags else value

    # -- running ---

    def run(self, item: Item) -> Steps:
        try:
            yield from self.run_put(item) if item.queue == PUT else self.run_copies(item)
        except Fault as fault:
            raise Fault(
                fault.kind, f"{item.label} of call {self.kernel.call}: {fault.text}"
            ) from None

    def run_copies(self, item: Item) -> Steps:
        """Credit, copies in two steps, flags: anything can happen between them."""
        if self.rules.credit_before_copy:
            yield from self.signals(item.credits)
        if not self.rules.data_before_flag:
            yield from self.signals(item.signals)
        half = len(item.copies) // 2
        self.copy(item.copies[:half])
        if half:
            yield False
        self.copy(item.copies[half:])
        yield False
        if self.rules.data_before_flag:
            yield from self.signals(item.signals)
        yield from self.signals(item.frees)
        if not self.rules.credit_before_copy:
            yield from self.signals(item.credits)

    def run_put(self, item: Item) -> Steps:
        """The network reads the source when it delivers, in two parts, however late that is."""
        turn = (self.kernel.call, item.turn)
        if item.turn and turn not in self.world.ranks[item.copies[0].target_rank].turns_given:
            raise Fault("out of turn", "its receiver has not posted this credit")
        half = len(item.copies) // 2

        def land(copies: list[Copy], last: bool) -> None:
            try:
                self.copy(copies)
            except Fault as fault:
                text = f"delivery of {item.label} of call {self.kernel.call}: {fault.text}"
                raise Fault(fault.kind, text) from None
            if last and self.rules.free_after_put_read:
                self.free_sources(item)

        def flag() -> None:
            for signal in item.signals:
                self.raise_flag(signal)

        steps = [
            lambda: land(item.copies[:half], last=False),
            lambda: land(item.copies[half:], last=True),
        ]
        steps.insert(2 if self.rules.data_before_flag else 0, flag)
        self.network.send(item.copies[0].target_rank, self.rank.puts, *steps)
        if not self.rules.free_after_put_read:
            self.free_sources(item)
        yield False

    def free_sources(self, item: Item) -> None:
        for signal in item.frees:
            self.signal(signal)

    def copy(self, copies: list[Copy]) -> None:
        kernel, number = self.kernel, self.rank.number
        for source_region, source_row, target_rank, target_region, target_row, row in copies:
            content = (kernel.call, row)
            if source_region != INPUT:
                kernel.heaps[number].regions[source_region].read(source_row, content)
            if target_region == OUTPUT:
                kernel.output.write(target_row, content)
            else:
                kernel.heaps[target_rank].regions[target_region].write(target_row, content)

    def signals(self, signals: list[Signal]) -> Steps:
        for signal in signals:
            self.signal(signal)
            yield False

    def signal(self, signal: Signal) -> None:
        if signal.turn:
            self.rank.turns_given.add((self.kernel.call, signal.turn))
        self.network.send(signal.rank, self.rank.signals, lambda: self.raise_flag(signal))

    def raise_flag(self, signal: Signal) -> None:
        """A plain store: a late one can also put an old value in the place of a new one."""
        target = self.world.ranks[signal.rank]
        if signal.counted:
            target.flags[signal.slot] = max(target.flags[signal.slot], self.stamp(0)) + 1
        else:
            target.flags[signal.slot] = self.stamp(signal.value)
        self.world.wake(target)

    # -- the end of the call ---

    def leave(self) -> Steps:
        rank, rules = self.rank, self.rules
        rank.blocks_out += 1
        if rank.blocks_out == 1 and not rules.tickets_reset_by_last:
            rank.tickets = [0] * len(QUEUE_NAMES)
        if rank.blocks_out < self.world.scenario.blocks:
            return
        aborted = bool(rank.abort)
        while not aborted and (
            (rules.quiet_puts and rank.puts.count) or (rules.quiet_signals and rank.signals.count)
        ):
            if rank.deadline_passed and rules.quiet_has_deadline:
                yield from self.world.give_up(rank)
            else:
                yield True
            aborted = bool(rank.abort) and rules.quiet_has_deadline
        if aborted:
            self.kernel.done = True
            self.world.wake(rank)
            return
        if rules.tickets_reset and rules.tickets_reset_by_last:
            rank.tickets = [0] * len(QUEUE_NAMES)
        rank.blocks_out = 0
        if rules.epoch_always_advances or any(self.queues):
            rank.epoch += 1
        self.kernel.done = True
        self.world.wake(rank)
