"""Lowering of whole and split tiles: balanced rails, same-index peers, credits."""

from __future__ import annotations

from dataclasses import dataclass

from .items import LAND, PACK, PUT, RECEIVE, Copy, FlagLayout, Item, Plan, Signal, Wait
from .lower import Builder, Traffic
from .memory import INPUT, OUTPUT, RECEIVING, SEND, WINDOW, Row
from .orders import Put, Tiles, order_by_assignment, order_by_list
from .rules import Rules


def server_tiles(traffic: Traffic, servers: int, num_local: int) -> Tiles:
    tiles = [[0] * servers for _ in range(servers)]
    for src, row in enumerate(traffic):
        for dst, rows in enumerate(row):
            if src // num_local != dst // num_local:
                tiles[src // num_local][dst // num_local] += rows
    return tiles


def balance(traffic: Traffic, a: int, b: int, num_local: int) -> list[list[Row]]:
    """[M] rows of each rail of the tile a -> b in stream order: own rows first, then others'."""
    rows_of = [
        [
            (src, dst, k)
            for dst in range(b * num_local, (b + 1) * num_local)
            for k in range(traffic[src][dst])
        ]
        for src in range(a * num_local, (a + 1) * num_local)
    ]
    total = sum(map(len, rows_of))
    whole, rest = divmod(total, num_local)
    room = [whole + ((rail - a - b) % num_local < rest) for rail in range(num_local)]
    rails = [rows[:cap] for rows, cap in zip(rows_of, room, strict=True)]
    for rows, cap in zip(rows_of, room, strict=True):
        for row in rows[cap:]:
            wanted = row[1] % num_local
            rail = wanted if len(rails[wanted]) < room[wanted] else -1
            if rail < 0:
                rail = next(k for k in range(num_local) if len(rails[k]) < room[k])
            rails[rail].append(row)
    return rails


@dataclass
class Chain:
    """The order of senders at one receiver, as far as it has been lowered."""

    credit_item: Item | None = None  # posts the credit of the next sender; None: nothing ever will
    turns: int = 0


class PlannedLowering(Builder):
    def __init__(
        self, layout: FlagLayout, traffic: Traffic, chunk_rows: int, lead: int, rules: Rules
    ) -> None:
        super().__init__(layout, traffic, chunk_rows, lead, rules)
        self.staged = [0] * self.num_ranks  # rows of send staging used so far
        self.received = [0] * self.num_ranks
        self.chunks: dict[tuple[int, int], int] = {}  # of earlier puts of a server pair
        self.occurrences: dict[tuple[int, int], int] = {}  # puts of a pair of ranks so far
        self.stages = [0] * self.num_ranks  # puts of a sender so far
        self.chains = [Chain() for _ in range(self.num_ranks)]

    def lower(self, order: list[Put], tiles: Tiles) -> Plan:
        self.post_ready_to_local_peers()
        rails_of: dict[tuple[int, int], list[list[Row]]] = {}
        for put in order:
            a, b = put.sender, put.receiver
            if (a, b) not in rails_of:
                rails_of[a, b] = balance(self.traffic, a, b, self.num_local)
            parts = [
                rows[
                    put.row_begin * len(rows) // tiles[a][b] : put.row_end
                    * len(rows)
                    // tiles[a][b]
                ]
                for rows in rails_of[a, b]
            ]
            if any(parts):
                self.lower_put(put, parts)
        self.lower_local()
        return self.finish(max(self.staged), max(self.received))

    def lower_put(self, put: Put, parts: list[list[Row]]) -> None:
        """All rails of one put, chunk by chunk."""
        a, b = put.sender, put.receiver
        num_chunks = self.num_chunks(max(map(len, parts)))
        first_chunk = self.chunks.get((a, b), 0)
        self.chunks[a, b] = first_chunk + num_chunks
        assert first_chunk + num_chunks <= self.layout.chunk_slots
        gates = [self.credit(put, rail, len(rows)) for rail, rows in enumerate(parts)]
        for chunk in range(num_chunks):
            flag_chunk = first_chunk + chunk
            chunks = [self.chunk(rows, chunk) for rows in parts]
            places: list[dict[Row, int]] = [{} for _ in parts]
            packs: list[list[tuple[int, int]]] = [[] for _ in parts]
            for local in range(self.num_local):
                for k in range(self.num_local):  # own rail first, then rotating
                    rail = (local + k) % self.num_local
                    rows = [row for row in chunks[rail] if row[0] % self.num_local == local]
                    if rows:
                        start = self.staged[a * self.num_local + rail] + chunk * self.chunk_rows
                        where = {row: start + n for n, row in enumerate(chunks[rail])}
                        places[rail].update(
                            self.pack_chunk(put, rail, rows, where, (chunk, flag_chunk, num_chunks))
                        )
                        packs[rail].append((local, self.layout.pack(local, b) + flag_chunk))
            receives: list[tuple[Item, list[Row], list[int]]] = []
            for rail, rows in enumerate(chunks):
                if rows:
                    receives.append(
                        self.put_chunk(
                            put,
                            rail,
                            rows,
                            places[rail],
                            packs[rail],
                            gates[rail],
                            (chunk, flag_chunk, num_chunks),
                        )
                    )
                    self.link_credit(
                        b * self.num_local + rail, len(parts[rail]), chunk, receives[-1][0]
                    )
            # Landings in the order in which the destination's queue holds them.
            for local in range(self.num_local):
                destination = b * self.num_local + local
                for item, rows, at in sorted(
                    receives, key=lambda r: (local - r[0].rank) % self.num_local
                ):
                    self.hand_on(
                        put, destination, item, rows, at, parts, (chunk, flag_chunk, num_chunks)
                    )
        for rail, rows in enumerate(parts):
            self.staged[a * self.num_local + rail] += len(rows)
            self.received[b * self.num_local + rail] += len(rows)

    def credit(self, put: Put, rail: int, num_rows: int) -> Wait | None:
        """Takes the receiver's next place for this put; returns the wait of its chunks."""
        sender, receiver = put.sender * self.num_local + rail, put.receiver * self.num_local + rail
        chain = self.chains[receiver]
        if not num_rows:
            if not self.rules.zero_row_puts_left_out:
                chain.turns, chain.credit_item = chain.turns + 1, None
            return None
        occurrence = self.occurrences.get((sender, receiver), 0) + 1
        self.occurrences[sender, receiver] = occurrence
        slot = self.layout.credit(receiver)
        if not self.rules.credit_by_writer:
            slot, occurrence = self.layout.credit(self.stages[sender]), 1
        self.stages[sender] += 1
        chain.turns += 1
        signal = Signal(sender, slot, occurrence, turn=chain.turns)
        if chain.turns == 1:
            self.posts[receiver].append(signal)
        elif chain.credit_item:
            chain.credit_item.credits.append(signal)
        return Wait(slot, occurrence, "gate_put")

    def link_credit(self, receiver: int, num_rows: int, chunk: int, item: Item) -> None:
        lead = self.lead if self.rules.credit_before_copy else 0
        if chunk == max(0, self.num_chunks(num_rows) - 1 - lead):
            self.chains[receiver].credit_item = item

    def pack_chunk(
        self,
        put: Put,
        rail: int,
        rows: list[Row],
        where: dict[Row, int],
        chunks: tuple[int, int, int],
    ) -> dict[Row, int]:
        """One source's rows of a chunk; returns where they lie in the proxy's send staging."""
        chunk, flag_chunk, num_chunks = chunks
        source, proxy = rows[0][0], put.sender * self.num_local + rail
        ticks = put.ticks_begin, put.ticks_end
        label = f"{put.sender}->{put.receiver} rail {rail}"
        pack = self.add(source, PACK, ticks, num_chunks, chunk, label)
        if source != proxy:
            pack.waits.append(self.ready(proxy, "gate_pack"))
        flag = self.layout.pack(source % self.num_local, put.receiver) + flag_chunk
        pack.signals.append(Signal(proxy, flag, 1))
        places = {row: where[row] for row in rows}
        if self.layout.ring_slots:
            slot = self.take_slot("send", proxy, source, pack)
            first = self.ring_row(source % self.num_local, slot)
            places = {row: first + k for k, row in enumerate(rows)}
        for row in rows:
            pack.copies.append(Copy(INPUT, self.input_row[row], proxy, SEND, places[row], row))
        return places

    def put_chunk(
        self,
        put: Put,
        rail: int,
        rows: list[Row],
        places: dict[Row, int],
        packs: list[tuple[int, int]],
        gate: Wait | None,
        chunks: tuple[int, int, int],
    ) -> tuple[Item, list[Row], list[int]]:
        """A rail's chunk: its put and the item that receives it; that item, and where rows lie."""
        chunk, flag_chunk, num_chunks = chunks
        proxy, receiver = put.sender * self.num_local + rail, put.receiver * self.num_local + rail
        ticks = put.ticks_begin, put.ticks_end
        label = f"{put.sender}->{put.receiver} rail {rail}"
        item = self.add(proxy, PUT, ticks, num_chunks, chunk, label)
        receive = self.add(receiver, RECEIVE, ticks, num_chunks, chunk, label)
        assert gate
        item.waits.append(gate)
        item.turn = self.chains[receiver].turns
        for local, flag in packs:
            item.waits.append(Wait(flag, 1))
            self.frees_if_ring("send", proxy, put.sender * self.num_local + local, item)
        first = self.received[receiver] + chunk * self.chunk_rows
        if self.layout.ring_slots:
            first = self.ring_row(put.sender, self.take_slot("receive", receiver, proxy, item))
            self.frees("receive", receiver, proxy, receive)
        at = list(range(first, first + len(rows)))
        for row, target_row in zip(rows, at, strict=True):
            item.copies.append(Copy(SEND, places[row], receiver, RECEIVING, target_row, row))
        self.signal_arrival(item, receive, flag_chunk)
        return receive, rows, at

    def hand_on(
        self,
        put: Put,
        destination: int,
        receive: Item,
        rows: list[Row],
        at: list[int],
        parts: list[list[Row]],
        chunks: tuple[int, int, int],
    ) -> None:
        """A receive item's rows for one destination: to its own output, or to a peer's window."""
        chunk, flag_chunk, num_chunks = chunks
        mine = [(row, place) for row, place in zip(rows, at, strict=True) if row[1] == destination]
        proxy = receive.rank
        if destination == proxy:
            for row, place in mine:
                receive.copies.append(
                    Copy(RECEIVING, place, proxy, OUTPUT, self.output_row[row], row)
                )
            return
        if any(
            row[1] == destination for row in parts[proxy % self.num_local]
        ):  # of the whole stream
            receive.waits.append(self.ready(destination, "gate_receive"))
        if not mine:
            return
        flag = self.layout.land(proxy % self.num_local, put.sender) + flag_chunk
        label = f"{put.sender}->{put.receiver} rail {proxy % self.num_local}"
        land = self.add(
            destination, LAND, (put.ticks_begin, put.ticks_end), num_chunks, chunk, label
        )
        land.waits.append(Wait(flag, 1))
        receive.signals.append(Signal(destination, flag, 1))
        window = self.window_rows("land", destination, proxy, [row for row, _ in mine], receive)
        self.frees_if_ring("land", destination, proxy, land)
        for (row, place), target_row in zip(mine, window, strict=True):
            receive.copies.append(Copy(RECEIVING, place, destination, WINDOW, target_row, row))
            land.copies.append(
                Copy(WINDOW, target_row, destination, OUTPUT, self.output_row[row], row)
            )


def plan_whole(
    layout: FlagLayout, traffic: Traffic, chunk_rows: int, lead: int, rules: Rules, policy: str
) -> Plan:
    """policy: 'list', 'assignment' (whole tiles), or 'split'."""
    tiles = server_tiles(traffic, layout.servers, layout.gpus_per_server)
    if policy == "assignment":
        order = order_by_assignment(tiles)
    else:
        # Parts of a few rows: pairs recur, also twice running where others round to nothing.
        order = order_by_list(tiles, most_rows=4 if policy == "split" else 1 << 30)
    return PlannedLowering(layout, traffic, chunk_rows, lead, rules).lower(order, tiles)
