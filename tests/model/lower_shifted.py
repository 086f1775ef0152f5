"""Lowering of direct and spreadout: unbalanced puts to the true destination, r + k at shift k."""

from __future__ import annotations

from .items import PACK, PUT, RECEIVE, Copy, FlagLayout, Item, Plan, Signal, Wait
from .lower import Builder, Traffic
from .memory import INPUT, OUTPUT, RECEIVING, SEND
from .rules import Rules


def plan_shifted(
    layout: FlagLayout, traffic: Traffic, chunk_rows: int, lead: int, rules: Rules, policy: str
) -> Plan:
    """policy: 'direct' (gated by the receiver's ready) or 'spreadout' (one credit at a time)."""
    builder = Builder(layout, traffic, chunk_rows, lead, rules)
    builder.post_ready_to_local_peers()
    num_ranks, num_local = layout.num_ranks, layout.gpus_per_server
    ranks = range(num_ranks)
    staged, received = [0] * num_ranks, [0] * num_ranks
    credit_item: list[Item | None] = [None] * num_ranks  # of the stream before, at each receiver
    turns = [0] * num_ranks
    now = 0
    for shift in range(1, num_ranks):
        pairs = [(src, (src + shift) % num_ranks) for src in ranks]
        pairs = [(s, d) for s, d in pairs if s // num_local != d // num_local and traffic[s][d]]
        ticks = now, now + max((traffic[s][d] for s, d in pairs), default=0)
        now = ticks[1]
        for src, dst in pairs:
            gate = Wait(layout.ready(dst), 1, "gate_put")
            if policy == "direct":
                builder.posts[dst].append(Signal(src, layout.ready(dst), 1))
            else:
                gate = Wait(layout.credit(dst), 1, "gate_put")
                before = credit_item[dst]
                to = before.credits if before else builder.posts[dst]
                turns[dst] += 1
                to.append(Signal(src, layout.credit(dst), 1, turn=turns[dst]))
            receives = _lower_pair(builder, src, dst, ticks, gate, staged[src], received[dst])
            for put in builder.queues[src][PUT][-len(receives) :]:
                put.turn = turns[dst]
            staged[src] += traffic[src][dst]
            received[dst] += traffic[src][dst]
            lead_here = lead if rules.credit_before_copy else 0
            credit_item[dst] = receives[max(0, len(receives) - 1 - lead_here)]
    builder.lower_local()
    return builder.finish(max(staged), max(received))


def _lower_pair(
    builder: Builder,
    src: int,
    dst: int,
    ticks: tuple[int, int],
    gate: Wait,
    send_row: int,
    receive_row: int,
) -> list[Item]:
    """Pack, put and receive of one pair of ranks; returns the receive items."""
    pair = [(src, dst, k) for k in range(builder.traffic[src][dst])]
    num_chunks = builder.num_chunks(len(pair))
    receives: list[Item] = []
    for chunk in range(num_chunks):
        label = f"{src}->{dst}"
        pack = builder.add(src, PACK, ticks, num_chunks, chunk, label)
        put = builder.add(src, PUT, ticks, num_chunks, chunk, label)
        receive = builder.add(dst, RECEIVE, ticks, num_chunks, chunk, label)
        flag = builder.layout.pack_direct(dst) + chunk
        pack.signals.append(Signal(src, flag, 1))
        put.waits += [gate, Wait(flag, 1)]
        builder.signal_arrival(put, receive, chunk)
        for row in builder.chunk(pair, chunk):
            sent, arrived = send_row + row[2], receive_row + row[2]
            pack.copies.append(Copy(INPUT, builder.input_row[row], src, SEND, sent, row))
            put.copies.append(Copy(SEND, sent, dst, RECEIVING, arrived, row))
            receive.copies.append(
                Copy(RECEIVING, arrived, dst, OUTPUT, builder.output_row[row], row)
            )
        receives.append(receive)
    return receives
