"""The rules of the protocol; each can be dropped alone, to see what goes wrong without it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rules:
    """All rules hold unless dropped. A wait of an item names the rule under which it stands."""

    # Remote writes wait until their target is in this call.
    gate_pack: bool = True  # ready of the proxy, before its send staging is written
    gate_push: bool = True  # ready of the destination, before its window is written
    gate_put: bool = True  # credit (planned) or ready (direct), before receive staging is written
    gate_receive: bool = True  # ready of every destination, before its window is written

    # Flags.
    epoch_in_flags: bool = True  # a flag holds epoch << 16 | value, so that old ones do not count
    wait_at_least: bool = True  # a wait is >=, not ==
    data_before_flag: bool = True
    flag_per_chunk: bool = (
        True  # dropped: arrivals of a pair are counted, as if they kept their order
    )
    credit_by_writer: bool = True  # dropped: the slot is the sender's stage number
    zero_row_puts_left_out: bool = True  # on both sides; dropped: only the sender leaves them out
    credit_before_copy: bool = True  # dropped: after the last chunk has been copied onward

    # Ends and beginnings of a call.
    quiet_puts: bool = True  # a kernel ends when its puts have been read and delivered
    quiet_signals: bool = True  # ... and its signals
    tickets_reset: bool = True
    tickets_reset_by_last: bool = True  # dropped: the first block out resets them
    epoch_always_advances: bool = True  # dropped: not on a rank without items
    records_double_buffered: bool = True
    records_by_exchange: bool = True  # in turn by exchanges; dropped: by epochs
    growth_waits_for_end: bool = True  # of the previous kernel, on all ranks
    growth_maps_after_all: bool = True  # peers' buffers are looked up once all have replaced theirs

    # Claims that hold an item while it waits ('help' discipline).
    help_before_wait: bool = True
    credit_time_below_put: bool = (
        True  # plan time of a receive item < that of the put it gives way to
    )

    # Abort.
    abort_to_all: bool = True
    quiet_has_deadline: bool = True  # the wait for quiet too ends with an abort
    heap_kept_after_abort: bool = True  # until no rank can write to it any more
    abort_one_origin: bool = True  # the origin is settled in one word of rank 0, then copied to all

    # Rings.
    free_send: bool = True  # each: wait for the free flag before a ring slot is used again
    free_receive: bool = True
    free_land: bool = True
    free_push: bool = True
    free_after_put_read: bool = True  # dropped: when the put is issued
    free_per_slot: bool = True  # dropped: one word per ring, holding the number of the freed use
    free_edges_in_order: bool = True  # dropped: queue orders that are right only without rings

    def without(self, *names: str) -> Rules:
        return replace(self, **dict.fromkeys(names, False))
