"""From traffic to items: what planned and direct lowering share, and the rings."""

from __future__ import annotations

from .items import (
    PUSH,
    QUEUE_NAMES,
    RECEIVE,
    TAKE,
    Copy,
    FlagLayout,
    Item,
    Plan,
    Signal,
    Wait,
    plan_time,
)
from .memory import INPUT, OUTPUT, WINDOW, Row
from .rules import Rules

Traffic = list[list[int]]  # [R][R] rows from each rank to each destination

RingKey = tuple[str, int, int]  # kind, owner, writer


class Builder:
    """Collects the items of all ranks, each queue in its order."""

    def __init__(
        self, layout: FlagLayout, traffic: Traffic, chunk_rows: int, lead: int, rules: Rules
    ) -> None:
        self.layout, self.traffic, self.chunk_rows = layout, traffic, chunk_rows
        self.lead, self.rules = lead, rules
        self.num_local, self.num_ranks = layout.gpus_per_server, layout.num_ranks
        ranks = range(self.num_ranks)
        self.queues: list[list[list[Item]]] = [[[] for _ in QUEUE_NAMES] for _ in ranks]
        self.posts: list[list[Signal]] = [[] for _ in ranks]
        self.inputs = [
            [(src, dst, k) for dst in ranks for k in range(traffic[src][dst])] for src in ranks
        ]
        self.outputs = [
            [(src, dst, k) for src in ranks for k in range(traffic[src][dst])] for dst in ranks
        ]
        self.input_row = {row: k for rows in self.inputs for k, row in enumerate(rows)}
        self.output_row = {row: k for rows in self.outputs for k, row in enumerate(rows)}
        self.freers: dict[RingKey, list[Item | None]] = {}  # who frees each use of a sub-ring

    # -- items ---

    def add(
        self, rank: int, queue: int, ticks: tuple[int, int], num_chunks: int, chunk: int, label: str
    ) -> Item:
        time = plan_time(queue, *ticks, num_chunks, chunk)
        if queue == RECEIVE and not self.rules.credit_time_below_put:
            time += 4 * (ticks[1] - ticks[0])
        item = Item(rank, queue, time, f"{QUEUE_NAMES[queue]} {label} chunk {chunk} at rank {rank}")
        self.queues[rank][queue].append(item)
        return item

    def chunk(self, rows: list[Row], chunk: int) -> list[Row]:
        return rows[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows]

    def num_chunks(self, num_rows: int) -> int:
        return -(-num_rows // self.chunk_rows)

    def ready(self, owner: int, rule: str) -> Wait:
        return Wait(self.layout.ready(owner), 1, rule)

    def arrive(self, writer: int, chunk: int) -> tuple[int, int]:
        """Slot and value of the flag of the pair's chunk."""
        if self.rules.flag_per_chunk:
            return self.layout.arrive(writer) + chunk, 1
        return self.layout.arrive(writer), chunk + 1

    def signal_arrival(self, put: Item, receive: Item, chunk: int) -> None:
        slot, value = self.arrive(put.rank, chunk)
        counted = not self.rules.flag_per_chunk
        put.signals.append(Signal(receive.rank, slot, value, counted=counted))
        receive.waits.append(Wait(slot, value))

    # -- rings ---

    def take_slot(self, ring: str, owner: int, writer: int, item: Item) -> int:
        """The slot of the writer's next use of its sub-ring; `item` writes it once it is free."""
        slots = self.layout.ring_slots
        uses = self.freers.setdefault((ring, owner, writer), [])
        use = len(uses)
        uses.append(None)
        if use >= slots:
            free = self.layout.free(ring, owner)
            slot, value = free + use % slots, use // slots
            if not self.rules.free_per_slot:
                slot, value = free, use - slots + 1
            item.waits.append(Wait(slot, value, f"free_{ring}"))
            freer = uses[use - slots]
            assert freer is not None
            freer.frees.append(Signal(writer, slot, value))
        return use % slots

    def frees(self, ring: str, owner: int, writer: int, item: Item) -> None:
        """`item` is the one that empties the latest use of the sub-ring."""
        self.freers[ring, owner, writer][-1] = item

    def ring_row(self, sub_ring: int, slot: int) -> int:
        return (sub_ring * self.layout.ring_slots + slot) * self.chunk_rows

    # -- rows that stay inside the server ---

    def post_ready_to_local_peers(self) -> None:
        for rank in range(self.num_ranks):
            for peer in self.others_of_server(rank):
                self.posts[rank].append(Signal(peer, self.layout.ready(rank), 1))

    def others_of_server(self, rank: int) -> list[int]:
        """The other ranks of the server, those after `rank` first."""
        server, local = divmod(rank, self.num_local)
        return [
            server * self.num_local + (local + k) % self.num_local for k in range(1, self.num_local)
        ]

    def lower_local(self) -> None:
        """Push and take: one stage per server, targets rotate chunk by chunk."""
        for server in range(self.layout.servers):
            ranks = range(server * self.num_local, (server + 1) * self.num_local)
            longest = max(self.traffic[i][j] for i in ranks for j in ranks)
            num_chunks = self.num_chunks(longest)
            for chunk in range(num_chunks):
                for src in ranks:
                    for dst in [*self.others_of_server(src), src]:
                        self.push_chunk(src, dst, chunk, num_chunks, longest)
            for rank in ranks:
                order = {peer: k for k, peer in enumerate(self.others_of_server(rank))}
                self.sort_local(rank, order)

    def push_chunk(self, src: int, dst: int, chunk: int, num_chunks: int, ticks: int) -> None:
        pair = [(src, dst, k) for k in range(self.traffic[src][dst])]
        rows = self.chunk(pair, chunk)
        if not rows:
            return
        label = f"{src}->{dst}"
        push = self.add(src, PUSH, (0, ticks), num_chunks, chunk, label)
        if src == dst:
            for row in rows:
                push.copies.append(
                    Copy(INPUT, self.input_row[row], src, OUTPUT, self.output_row[row], row)
                )
            return
        take = self.add(dst, TAKE, (0, ticks), num_chunks, chunk, label)
        local = src % self.num_local
        flag = self.layout.push(local) + chunk
        push.waits.append(self.ready(dst, "gate_push"))
        push.signals.append(Signal(dst, flag, 1))
        take.waits.append(Wait(flag, 1))
        place = self.window_rows("push", dst, src, rows, push)
        self.frees_if_ring("push", dst, src, take)
        for row, at in zip(rows, place, strict=True):
            push.copies.append(Copy(INPUT, self.input_row[row], dst, WINDOW, at, row))
            take.copies.append(Copy(WINDOW, at, dst, OUTPUT, self.output_row[row], row))

    def window_rows(
        self, ring: str, owner: int, writer: int, rows: list[Row], item: Item
    ) -> list[int]:
        """Where `rows` lie in the owner's window: at their output place, or in a ring's slot."""
        if not self.layout.ring_slots:
            return [self.output_row[row] for row in rows]
        slot = self.take_slot(ring, owner, writer, item)
        sub_ring = writer % self.num_local + (self.num_local if ring == "push" else 0)
        first = self.ring_row(sub_ring, slot)
        return list(range(first, first + len(rows)))

    def frees_if_ring(self, ring: str, owner: int, writer: int, item: Item) -> None:
        if self.layout.ring_slots:
            self.frees(ring, owner, writer, item)

    def sort_local(self, rank: int, order: dict[int, int]) -> None:
        """With `free_edges_in_order` dropped: by peer, not by chunk; takes: the last to turn first.

        All pushes precede all takes in plan time: a right order for windows of whole-call size.
        """
        if self.rules.free_edges_in_order:
            return
        for queue in (PUSH, TAKE):
            items = self.queues[rank][queue]
            end = {PUSH: 1, TAKE: 0}[queue]  # which end of the label names the peer
            peer = {id(item): int(item.label.split()[1].split("->")[end]) for item in items}
            items.sort(key=lambda item: order.get(peer[id(item)], len(order)))
            for item in items:
                item.time = 0 if queue == PUSH else 1

    # -- the whole ---

    def finish(self, send_rows: int, receive_rows: int) -> Plan:
        window_rows = max(map(len, self.outputs)) if self.num_local > 1 else 0
        if self.layout.ring_slots:
            slot_rows = self.layout.ring_slots * self.chunk_rows
            send_rows = self.num_local * slot_rows
            receive_rows = self.layout.servers * slot_rows
            window_rows = 2 * self.num_local * slot_rows
        heap_rows = (send_rows, receive_rows, window_rows)
        return Plan(self.layout, self.queues, self.posts, self.outputs, self.inputs, heap_rows)
