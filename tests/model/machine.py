"""Hosts and streams of all ranks, and `play`: one run from a seed."""

from __future__ import annotations

from functools import partial
from random import Random

from .kernel import Block
from .memory import Fault, Heap, Region
from .rank import Kernel, Rank, Steps
from .scenario import Scenario, Setting, make_scenario
from .world import World


class Machine(World):
    def __init__(self, scenario: Scenario, random: Random) -> None:
        super().__init__(scenario, random)
        for rank in self.ranks:
            self.start(rank, self.host(rank))
            self.start(rank, self.stream(rank))

    # -- host ---

    def host(self, rank: Rank) -> Steps:
        """Enters call after call; waits for each kernel unless it runs ahead."""
        for index, call in enumerate(self.scenario.calls):
            if call.exchange:
                yield from self.exchange(rank, index)
            if self.setting.grows and not rank.abort:
                yield from self.grow(rank, index)
            if rank.abort:
                break
            rank.queued = index + 1
            self.wake(rank)
            yield False
            while not self.setting.early and rank.calls_done <= index and not rank.abort:
                yield True
        while rank.calls_done < len(self.scenario.calls) and not rank.abort:
            yield True
        rank.host_done = rank.calls_done == len(self.scenario.calls)
        if rank.abort and not rank.host_done:
            yield from self.leave_after_abort(rank)

    def leave_after_abort(self, rank: Rank) -> Steps:
        """Frees the heap once nobody can write to it: all have acknowledged, ended, or exited."""
        while rank.kernel and not rank.kernel.done:
            yield True
        if self.setting.rules.heap_kept_after_abort:
            while rank.puts.count > rank.puts.lost:
                yield True
            rank.acknowledged = True
            for other in self.ranks:
                self.wake(other)
            while not all(
                r.acknowledged or r.host_done or (r.stopped and r.puts.count == r.puts.lost)
                for r in self.ranks
            ):
                yield True
        rank.heap.free()
        rank.left = True

    def wait_for(self, rank: Rank, words: list[int], value: int) -> Steps:
        """Until all `words` of the rank's memory are at least `value`, or the call is aborted."""
        while min(words) < value and not rank.abort:
            if rank.deadline_passed:
                yield from self.give_up(rank)
            else:
                yield True

    def exchange(self, rank: Rank, index: int) -> Steps:
        """The record of this call to every rank, then all records of this call; the word is last.

        Two sets in turn. It is exchanges that are counted: where some calls have none, sets in turn
        by epoch could follow each other in the same place.
        """
        epoch, rules = index + 1, self.setting.rules
        parity = epoch % 2
        if rules.records_by_exchange:
            parity = sum(call.exchange for call in self.scenario.calls[:epoch]) % 2
        if not rules.records_double_buffered:
            parity = 0
        for other in self.ranks:
            self.send_record(rank, other, parity, index)
            yield False
        yield from self.wait_for(rank, rank.record_words[parity], epoch)
        for writer in range(len(self.ranks)):
            if rank.abort:
                return
            if rank.records[parity][writer] != (index, writer):
                found = rank.records[parity][writer]
                text = f"rank {rank.number} in call {index} reads {found} of {writer}"
                raise Fault("wrong record", text)
            yield False

    def send_record(self, rank: Rank, other: Rank, parity: int, index: int) -> None:
        def write_payload() -> None:
            other.records[parity][rank.number] = (index, rank.number)

        def write_word() -> None:
            other.record_words[parity][rank.number] = index + 1
            self.wake(other)

        self.network.send(other.number, rank.signals, write_payload, write_word)

    def grow(self, rank: Rank, index: int) -> Steps:
        """Replaces the heap where this call needs a larger one. All ranks see the same need."""
        need = self.scenario.calls[index].plan.heap_rows
        if all(have >= rows for have, rows in zip(rank.heap.num_rows, need, strict=True)):
            return
        rules = self.setting.rules
        if rules.growth_waits_for_end:
            while rank.calls_done < index and not rank.abort:
                yield True
            yield from self.agree(rank, 0, index)
        if rank.abort:
            return
        larger = tuple(map(max, rank.heap.num_rows, need))
        rank.heap.free()
        rank.heap = Heap(rank.number, (larger[0], larger[1], larger[2]))
        if rules.growth_maps_after_all:
            yield from self.agree(rank, 1, index)

    def agree(self, rank: Rank, step: int, value: int) -> Steps:
        """A word per step: the first may arrive after the second."""

        def write(other: Rank) -> None:
            other.grow_words[step][rank.number] = value
            self.wake(other)

        for other in self.ranks:
            self.network.send(other.number, rank.signals, partial(write, other))
            yield False
        yield from self.wait_for(rank, rank.grow_words[step], value)

    # -- stream ---

    def stream(self, rank: Rank) -> Steps:
        """Runs the kernels one after the other; the user then reads the output."""
        for index, call in enumerate(self.scenario.calls):
            while rank.queued <= index and not rank.abort:
                yield True
            if rank.abort:
                return
            plan = call.plan
            rows = plan.outputs[rank.number]
            output = Region(f"output of rank {rank.number}", len(rows))
            heaps = [other.heap for other in self.ranks]
            kernel = Kernel(index, plan, rank.epoch + 1, heaps, output)
            rank.kernel = kernel
            for block in range(self.scenario.blocks):
                self.start(rank, Block(self, rank, kernel, block).steps())
            while not kernel.done:
                yield True
            if rank.abort:
                self.wake(rank)
                return
            if output.content != [(index, row) for row in rows]:
                raise Fault("wrong output", f"rank {rank.number}, call {index}: {output.content}")
            rank.calls_done = index + 1
            self.wake(rank)


def play(setting: Setting, seed: int) -> Fault | None:
    """One run; the fault that it found, with the seed and the scenario in its text, or none."""
    random = Random(seed)
    scenario = make_scenario(setting, random)
    machine = Machine(scenario, random)
    try:
        machine.play()
        origins = {rank.abort for rank in machine.ranks if rank.left}
        if len(origins) > 1:
            raise Fault(
                "origins differ", str({r.number: r.abort - 1 for r in machine.ranks if r.left})
            )
    except Fault as fault:
        return Fault(
            fault.kind, f"{fault.text} (seed {seed}: {scenario.text}; step {machine.num_steps})"
        )
    return None
