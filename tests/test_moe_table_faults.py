"""Tables of dispatch and combine with one thing wrong: found by the validator, or harmless."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern.planner import MoePlan, StageTable, Topology
from fastkern.planner.table import ARRAYS, DTYPES, NO_SLOT
from tests.moe_table_edits import (
    QUEUES_OF,
    Edit,
    edited,
    example,
    found,
    queue_of,
    right_by_oracle,
    tables_of,
)

# What may change by one without harm: plan times (as long as they still rise), when a credit is
# given, where a queue without stages begins, and how a stream is cut that others do not count along
# with. The oracle must run such tables to the same end.
HARMLESS = {
    ("stages", "ticks_begin"),
    ("stages", "ticks_end"),
    ("streams", "credit_chunk"),
    ("queues", "first_stage"),
    ("streams", "chunk_rows"),
    ("streams", "num_rows"),
    ("segments", "num_rows"),
    ("segments", "stream_row"),
}


@pytest.mark.parametrize("policy", ["whole", "direct"])
@pytest.mark.parametrize("op", QUEUES_OF)
@pytest.mark.parametrize("array", ARRAYS)
def test_every_field_changed_by_one_is_found_or_harmless(op: str, policy: Any, array: str) -> None:
    call, tables = example(policy), tables_of(op, policy)
    assert found(call, tables) == ""
    num_found, unseen = 0, set()
    rng = np.random.default_rng(len(array))
    places: dict[str, list[tuple[int, int]]] = {}
    for rank, table in enumerate(tables):
        for k, queue in enumerate(queue_of(table, array)):
            places.setdefault(queue, []).append((rank, k))
    for of_queue in places.values():
        for place in rng.permutation(len(of_queue))[:3]:
            rank, k = of_queue[place]
            for field in DTYPES[ARRAYS[array]].names or ():
                for change in (-1, 1):
                    if tables[rank].records(array)[k][field] + change < 0:
                        continue

                    def edit(
                        c: dict[str, Any], k: int = k, field: str = field, change: int = change
                    ) -> None:
                        c[array][k][field] = (c[array][k][field] + change) % (1 << 32)

                    wrong = [*tables[:rank], edited(tables[rank], edit), *tables[rank + 1 :]]
                    if found(call, wrong):
                        num_found += 1
                        continue
                    unseen.add((array, field))
                    what = f"rank {rank}: {array}[{k}].{field} {change:+d}"
                    assert (array, field) in HARMLESS, f"{what} goes unseen"
                    assert right_by_oracle(op, policy, wrong), f"{what} does harm"
    assert num_found > 10 * len(places)


@pytest.mark.parametrize("op", QUEUES_OF)
def test_every_field_of_the_header_is_checked(op: str) -> None:
    call, tables = example(), tables_of(op)
    for field in DTYPES["Header"].names or ():
        for change in (-1, 1):
            block = tables[1].bytes.copy()
            header = block[: DTYPES["Header"].itemsize].view(DTYPES["Header"])
            if int(header[field][0]) + change < 0:
                continue
            header[field] += np.array(change).astype(header[field].dtype)
            wrong = [tables[0], StageTable(block), *tables[2:]]
            assert found(call, wrong), f"{field} {change:+d} goes unseen"


@settings(max_examples=150, deadline=None)
@given(
    op=st.sampled_from(sorted(QUEUES_OF)),
    policy=st.sampled_from(["whole", "split", "direct", "spreadout"]),
    seed=st.integers(0, 10**9),
)
def test_what_the_validator_passes_the_oracle_runs(op: str, policy: Any, seed: int) -> None:
    """Random bits anywhere in a table: found, or harmless in any order of items."""
    rng = np.random.default_rng(seed)
    tables = list(tables_of(op, policy))
    rank = int(rng.integers(len(tables)))
    block = tables[rank].bytes.copy()
    words = block.view(np.uint32)
    for _ in range(int(rng.integers(1, 3))):
        k = int(rng.integers(len(words)))
        words[k] ^= np.uint32(1 << int(rng.integers(32)))
    tables[rank] = StageTable(block)
    if not found(example(policy), tables):
        assert right_by_oracle(op, policy, tables)
        assert right_by_oracle(op, policy, tables, rng)


# -- what each rule says ---------------------------------------------------------------------------


def stream_of(table: StageTable, queue: str, **fields: int) -> int:
    """The first stream of a queue with these fields."""
    for k, of in enumerate(queue_of(table, "streams")):
        s = table.records("streams")[k]
        if of == queue and all(s[name] == value for name, value in fields.items()):
            return k
    raise AssertionError(f"no stream of {queue} with {fields}")


def set_stream(queue: str, where: dict[str, int] | None = None, **fields: int) -> Any:
    def make(table: StageTable) -> Edit:
        k = stream_of(table, queue, **(where or {}))
        return lambda c: c["streams"][k].update(fields)

    return make


def add_to_segment(queue: str, **fields: int) -> Any:
    def make(table: StageTable) -> Edit:
        first = table.records("streams")[stream_of(table, queue)]["first_segment"]

        def edit(c: dict[str, Any]) -> None:
            for name, value in fields.items():
                c["segments"][first][name] += value

        return edit

    return make


def set_link(queue: str, **fields: int) -> Any:
    def make(table: StageTable) -> Edit:
        first = table.records("streams")[stream_of(table, queue)]["first_link"]
        return lambda c: c["links"][first].update(fields)

    return make


def drop_links(queue: str) -> Any:
    """A stream without its links; those of later streams move up."""

    def make(table: StageTable) -> Edit:
        k = stream_of(table, queue)

        def edit(c: dict[str, Any]) -> None:
            first, number = c["streams"][k]["first_link"], c["streams"][k]["num_links"]
            del c["links"][first : first + number]
            c["streams"][k]["num_links"] = 0
            for s in c["streams"][k + 1 :]:
                s["first_link"] -= number
            c["header"]["num_links"] -= number
            c["header"]["table_bytes"] -= 16 * number

        return edit

    return make


def plan_later(queue: str) -> Any:
    """The last stage of a queue, planned behind everything."""

    def make(table: StageTable) -> Edit:
        k = max(k for k, of in enumerate(queue_of(table, "stages")) if of == queue)
        return lambda c: c["stages"][k].update(ticks_begin=1 << 50, ticks_end=(1 << 50) + 40)

    return make


FAULTS: list[tuple[str, str, Any, str]] = [
    ("dispatch", "whole", set_link("receive", gate_slot=NO_SLOT), "without a gate"),
    ("dispatch", "whole", set_link("receive", rank=0), "links its own rank"),
    ("dispatch", "whole", set_link("receive", rank=2), "not a peer|another server"),
    ("dispatch", "whole", drop_links("receive"), "misses local rank 1"),
    ("dispatch", "whole", set_stream("put", gate_slot=NO_SLOT, gate_value=0), "without a credit"),
    ("dispatch", "direct", set_stream("put", gate_slot=NO_SLOT, gate_value=0), "without a gate"),
    ("dispatch", "whole", set_stream("pack", {"peer": 1}, gate_slot=NO_SLOT, gate_value=0), "gate"),
    ("dispatch", "whole", set_stream("push", {"peer": 1}, gate_slot=0), "without a gate"),
    ("dispatch", "whole", set_stream("land", gate_slot=1, gate_value=1), "needs none"),
    ("dispatch", "whole", add_to_segment("pack", row=1), "twice|past the end"),
    ("dispatch", "whole", add_to_segment("push", row=1), "twice|past the end|should be row"),
    ("dispatch", "whole", add_to_segment("take", row=1), "nothing wrote|should be row|without"),
    ("dispatch", "whole", add_to_segment("receive", peer=1), "is of rank|in another server"),
    ("dispatch", "whole", set_stream("receive", source_row=1), "nothing wrote|without their flag"),
    ("dispatch", "whole", plan_later("pack"), "written no earlier than awaited"),
    ("dispatch", "whole", plan_later("receive"), "written no earlier than awaited"),
    ("combine", "whole", set_link("sum", rank=0), "links its own rank"),
    ("combine", "whole", drop_links("sum"), "misses local rank 1"),
    ("combine", "whole", set_stream("pack", gate_slot=NO_SLOT, gate_value=0), "without a gate"),
    ("combine", "whole", set_stream("push", gate_slot=NO_SLOT, gate_value=0), "without a gate"),
    ("combine", "whole", add_to_segment("pack", row=1), "Arrival record|twice|another chunk"),
    ("combine", "whole", add_to_segment("push", row=1), "should be row"),
    ("combine", "whole", add_to_segment("receive", row=1), "twice|past the end|should be row"),
    ("combine", "whole", add_to_segment("receive", peer=1), "hands|never written"),
    ("combine", "whole", set_stream("sum", source_row=1), "another chunk|nothing wrote"),
    ("combine", "whole", set_stream("sum", target_row=1), "twice|past the end|nothing wrote"),
    ("combine", "whole", set_stream("push", target_row=1), "past the end|nothing wrote"),
    ("combine", "whole", set_stream("reduce", peer=1), "another rank's"),
    ("combine", "whole", plan_later("land"), "no later than rows that it sums land"),
    ("combine", "whole", plan_later("take"), "no later than rows that it sums land"),
    ("combine", "whole", plan_later("sum"), "written no earlier than awaited"),
    ("combine", "direct", set_stream("put", gate_slot=NO_SLOT, gate_value=0), "without a gate"),
]


@pytest.mark.parametrize(("op", "policy", "make", "text"), FAULTS)
def test_each_rule_is_checked(op: str, policy: Any, make: Any, text: str) -> None:
    call, tables = example(policy), tables_of(op, policy)
    wrong = [edited(tables[0], make(tables[0])), *tables[1:]]
    assert re.search(text, found(call, wrong)), found(call, wrong)


def test_combines_of_other_plans_and_numbers_are_refused() -> None:
    call = example()
    with pytest.raises(ValueError, match="an entry per rank"):
        call.plan.validate_combine(16, 16, 1, [1] * 5)
    with pytest.raises(ValueError, match="at least one byte"):
        call.plan.validate_combine(0, 16, 1, [1] * 6)
    other = example("split")
    assert "not of this plan" in found(other, tables_of("combine"))
    mixed = [*tables_of("dispatch")[:5], tables_of("combine")[5]]
    assert "the operation is not" in found(call, mixed)


def test_a_fault_is_raised_with_its_text() -> None:
    class Faulty:
        def validate(self) -> list[str]:
            return ["rank 3 put: first"]

        def validate_combine(self, *_: Any) -> list[str]:
            return ["rank 3 sum: second"]

    made = MoePlan(Faulty(), Topology(3, 2))
    with pytest.raises(RuntimeError, match="rank 3 put: first"):
        made.validate()
    with pytest.raises(RuntimeError, match="rank 3 sum: second"):
        made.validate_combine(16, 16, 0, [0] * 6)
