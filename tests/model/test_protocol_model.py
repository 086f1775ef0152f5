"""The protocol under random schedules: no fault with all rules, the expected one without each.

Seeds are fixed; a failure prints the seed and the scenario, and `play(setting, seed)` repeats it.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from .items import FlagLayout, check_plan
from .lower_planned import plan_whole
from .lower_shifted import plan_shifted
from .machine import play
from .rules import Rules
from .scenario import PLANNED, POLICIES, Setting, random_traffic

RINGS = Setting(policies=PLANNED, ring_slots=(1, 2, 3))
SYNCHRONOUS_EXCHANGE = Setting(exchange=1.0)
GROWING = Setting(grows=True)
STOPPING = Setting(stop=True, exchange=0.5)
LARGE = Setting(
    servers=(4, 5), gpus_per_server=(3,), most_ranks=15, rows=(0, 0, 0, 0, 1, 3), calls=(3,)
)

SOUND = {
    **{policy: (Setting(policies=(policy,)), 80) for policy in POLICIES},
    "one block": (Setting(blocks=(1,)), 100),
    "several blocks": (Setting(blocks=(2, 3, 5)), 150),
    "late messages": (Setting(patience=(0.3,)), 100),
    "sparse": (Setting(rows=(0, 0, 0, 1), calls=(5,)), 150),
    "large": (LARGE, 60),
    "help": (Setting(claim="help"), 100),
    "help, one block": (Setting(claim="help", blocks=(1,)), 80),
    "fixed roles, a block per queue": (Setting(claim="fixed", blocks=(6,)), 50),
    "exchange": (SYNCHRONOUS_EXCHANGE, 80),
    "exchange at some calls": (Setting(exchange=0.5), 80),
    "exchange, host ahead": (Setting(exchange=0.6, early=True), 80),
    "growth": (GROWING, 80),
    "growth, host ahead": (replace(GROWING, early=True), 80),
    "rings": (RINGS, 150),
    "rings, one block": (replace(RINGS, blocks=(1,)), 60),
    "rings, help": (replace(RINGS, claim="help"), 80),
    "rings, exchange": (replace(RINGS, exchange=0.5, early=True), 60),
    "rank stops": (STOPPING, 150),
    "rank stops, all deadlines near": (replace(STOPPING, expiries=99), 150),
    "rank stops, growth": (replace(STOPPING, grows=True, early=True), 80),
    "rank stops, rings": (replace(RINGS, stop=True), 80),
}


class Control(NamedTuple):
    """A rule to drop, where to look for the fault, and of what kind it may be."""

    rule: str
    setting: Setting
    kinds: set[str]
    runs: int = 60


MANY_LOCAL = Setting(policies=PLANNED, servers=(2, 3), gpus_per_server=(2, 3))
DIRECT = Setting(policies=("direct",))
SMALL = Setting(servers=(2, 3), gpus_per_server=(1,), rows=(0, 0, 0, 0, 1), calls=(5,))
LATE_READY = Setting(
    patience=(0.3,), servers=(2, 3), gpus_per_server=(2, 3), rows=(0, 0, 0, 1), calls=(5,)
)

CONTROLS = [
    # Ready gates: a fast rank writes into a call that its peer has not left.
    Control("gate_pack", MANY_LOCAL, {"overwrite"}),
    Control("gate_push", replace(MANY_LOCAL, servers=(1, 2)), {"overwrite"}),
    Control("gate_receive", replace(MANY_LOCAL, blocks=(3, 5)), {"overwrite"}, runs=100),
    Control("gate_put", DIRECT, {"overwrite"}),
    Control("gate_put", MANY_LOCAL, {"overwrite", "out of turn"}),
    # Flags.
    Control("epoch_in_flags", Setting(), {"stale read", "overwrite", "out of turn"}),
    Control("wait_at_least", Setting(), {"hang"}),
    Control("data_before_flag", Setting(), {"stale read"}),
    Control("flag_per_chunk", Setting(), {"stale read", "hang"}),
    Control(
        "credit_by_writer",
        Setting(
            servers=(3, 4), gpus_per_server=(1,), policies=("list", "assignment"), calls=(4, 5)
        ),
        {"out of turn", "overwrite", "hang"},
        runs=100,
    ),
    Control(
        "zero_row_puts_left_out", replace(MANY_LOCAL, servers=(3,), rows=(0, 0, 0, 1)), {"hang"}
    ),
    # The end of a call.
    Control("quiet_puts", Setting(), {"overwrite", "stale read"}, runs=100),
    Control("quiet_signals", LATE_READY, {"hang"}, runs=100),
    Control("tickets_reset", Setting(), {"wrong output", "hang"}),
    Control("tickets_reset_by_last", Setting(blocks=(2, 3)), {"claimed twice"}),
    Control("epoch_always_advances", Setting(rows=(0, 0, 0, 1)), {"hang", "overwrite"}),
    # The beginning of a call.
    Control("records_double_buffered", SYNCHRONOUS_EXCHANGE, {"wrong record"}),
    Control(
        "records_by_exchange", replace(SMALL, exchange=0.5, early=True), {"wrong record"}, runs=100
    ),
    Control("growth_waits_for_end", replace(GROWING, early=True), {"freed memory"}),
    Control("growth_maps_after_all", GROWING, {"freed memory"}),
    # Claims that hold an item while it waits.
    Control("help_before_wait", Setting(claim="help", blocks=(1, 2)), {"hang"}),
    Control("credit_time_below_put", Setting(claim="help", blocks=(1,)), {"hang"}),
    # Abort.
    Control("abort_to_all", Setting(stop=True), {"hang"}),
    Control("abort_one_origin", Setting(stop=True), {"origins differ"}, runs=100),
    Control("quiet_has_deadline", Setting(stop=True), {"hang"}),
    Control("heap_kept_after_abort", Setting(stop=True), {"freed memory"}),
    # Rings.
    Control("free_send", RINGS, {"overwrite"}),
    Control("free_receive", RINGS, {"overwrite"}),
    Control("free_land", RINGS, {"overwrite"}),
    Control("free_push", RINGS, {"overwrite"}),
    Control("free_after_put_read", RINGS, {"overwrite", "stale read"}),
    Control(
        "free_per_slot", replace(RINGS, ring_slots=(2, 3), blocks=(3, 5)), {"overwrite", "hang"}
    ),
    Control(
        "free_edges_in_order",
        replace(RINGS, ring_slots=(1,), gpus_per_server=(3,), servers=(1, 2), rows=(3, 5)),
        {"hang"},
        runs=30,
    ),
]

# Rules without which nothing goes wrong, and why they are kept: see README.md.
HARMLESS = {"credit_before_copy"}


def assert_sound(setting: Setting, runs: int) -> None:
    for seed in range(runs):
        fault = play(setting, seed)
        assert fault is None, str(fault)


@pytest.mark.parametrize(("setting", "runs"), SOUND.values(), ids=SOUND)
def test_no_fault_with_all_rules(setting: Setting, runs: int) -> None:
    assert_sound(setting, runs)


@pytest.mark.parametrize(
    "control", CONTROLS, ids=lambda c: f"{c.rule}-{'-'.join(c.setting.policies)}"
)
def test_dropped_rule_is_found(control: Control) -> None:
    dropped = replace(control.setting, rules=Rules().without(control.rule))
    found: dict[str, str] = {}
    for seed in range(control.runs):
        if fault := play(dropped, seed):
            found.setdefault(fault.kind, str(fault))
    assert found, f"{control.runs} runs without {control.rule} and no fault"
    assert set(found) <= control.kinds, found
    # The same runs with the rule: it is the rule that was missing.
    assert_sound(control.setting, control.runs // 3)


def test_every_rule_has_a_control() -> None:
    assert {f.name for f in fields(Rules)} == {control.rule for control in CONTROLS} | HARMLESS


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_fixed_roles_deadlock_with_few_blocks(blocks: int) -> None:
    setting = Setting(claim="fixed", blocks=(blocks,))
    kinds = [fault.kind for seed in range(30) if (fault := play(setting, seed))]
    assert set(kinds) == {"hang"}


def test_late_credit_is_slower_not_wrong() -> None:
    assert_sound(Setting(rules=Rules().without("credit_before_copy")), 100)
    assert_sound(Setting(blocks=(1,), rules=Rules().without("credit_before_copy")), 50)


def test_synchronous_exchange_implies_the_ready_gates() -> None:
    """A record posted after the kernel's end says what ready says; gates are for other calls."""
    rules = Rules().without("gate_pack", "gate_push", "gate_receive")
    assert_sound(replace(SYNCHRONOUS_EXCHANGE, rules=rules), 100)
    ahead = replace(SYNCHRONOUS_EXCHANGE, early=True, rules=rules)
    assert any(play(ahead, seed) for seed in range(60))


def test_synchronous_exchange_implies_the_end_before_growth() -> None:
    assert_sound(replace(GROWING, rules=Rules().without("growth_waits_for_end")), 60)


@pytest.mark.parametrize("ring_slots", [0, 1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_plan_times_increase_along_every_flag(policy: str, ring_slots: int) -> None:
    """Free flags included: rings need no other order than whole-call buffers."""
    if ring_slots and policy not in PLANNED:
        policy = "split"  # direct and spreadout have no rings; more splits instead
    random = Random(1)
    lower = plan_whole if policy in PLANNED else plan_shifted
    for _ in range(40):
        servers, num_local = random.randint(1, 5), random.randint(1, 3)
        layout = FlagLayout(servers * num_local, servers, num_local, 64, ring_slots)
        traffic = random_traffic(random, layout.num_ranks, (0, 0, 1, 2, 5))
        plan = lower(layout, traffic, random.randint(1, 3), random.randint(0, 3), Rules(), policy)
        assert check_plan(plan) == []


@pytest.mark.parametrize("rule", ["free_edges_in_order", "credit_time_below_put"])
def test_wrong_plan_times_are_seen_in_the_plan(rule: str) -> None:
    """What hangs above is visible before anything runs; a fault of rings only with rings."""
    traffic = [[3] * 6 for _ in range(6)]
    rules = Rules().without(rule)
    faults = [
        check_plan(plan_whole(FlagLayout(6, 2, 3, 64, ring_slots), traffic, 1, 1, rules, "list"))
        for ring_slots in (1, 0)
    ]
    assert faults[0]
    assert bool(faults[1]) == (rule == "credit_time_below_put")


def test_flag_slots_are_those_of_the_stage_table() -> None:
    """Every formula of `FlagLayout` in stage_table.h, evaluated as it stands there."""
    header = (Path(__file__).parents[2] / "planner" / "stage_table.h").read_text()
    body = header[header.index("struct FlagLayout {") :]
    body = body[: body.index("\n};")]
    formulas = re.findall(r"u32 (\w+)\(([^)]*)\) const \{\s*return ([^;]+);", body)
    assert len(formulas) >= 11
    layout = FlagLayout(num_ranks=6, servers=2, gpus_per_server=3, chunk_slots=7, ring_slots=0)
    names: dict[str, object] = dict(layout._asdict())
    for name, parameters, expression in formulas:
        arguments = dict.fromkeys(re.findall(r"u32 (\w+)", parameters), 1)
        # Some are written in terms of others.
        names |= {"push": layout.push, "sum": layout.sum, "land": layout.land}
        expected = eval(expression, {"__builtins__": {}}, names | arguments)
        assert getattr(layout, name)(*arguments.values()) == expected, name
