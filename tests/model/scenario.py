"""Random calls to play: topology, traffic, policies, who is slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from .items import FlagLayout, Plan
from .lower import Traffic
from .lower_planned import plan_whole
from .lower_shifted import plan_shifted
from .rules import Rules

PLANNED = ("list", "assignment", "split")
POLICIES = (*PLANNED, "direct", "spreadout")


@dataclass(frozen=True)
class Setting:
    """What a test fixes; the rest is drawn from the seed."""

    policies: tuple[str, ...] = POLICIES
    claim: str = "ready"  # 'ready', 'help' or 'fixed'
    blocks: tuple[int, ...] = (1, 2, 3, 5)
    servers: tuple[int, ...] = (1, 2, 2, 3, 3, 4)
    gpus_per_server: tuple[int, ...] = (1, 2, 2, 3)
    calls: tuple[int, ...] = (3, 4, 5)
    rows: tuple[int, ...] = (0, 0, 1, 2, 5)
    leads: tuple[int, ...] = (0, 1, 2, 3)
    most_ranks: int = 8
    ring_slots: tuple[int, ...] = (0,)
    exchange: float = 0.0  # share of calls that begin with a count exchange
    early: bool = False  # the host runs ahead of its kernels
    grows: bool = False  # buffers as large as each call needs (every call then has an exchange)
    stop: bool = False  # one rank stops at some time, one gives up at some time
    expiries: int = 2  # deadlines that pass; those of other ranks are far away
    patience: tuple[float, ...] = (0.0, 0.05, 0.2)
    rules: Rules = field(default_factory=Rules)


@dataclass
class Call:
    plan: Plan
    exchange: bool


@dataclass
class Scenario:
    setting: Setting
    calls: list[Call]
    blocks: int
    slow: set[int]
    slowness: float  # share of its turns that a slow rank passes up
    network_share: float  # share of turns that the network gets
    patience: float
    text: str


def random_traffic(random: Random, num_ranks: int, rows: tuple[int, ...]) -> Traffic:
    """Some ranks send nothing, some receive nothing, now and then all."""
    if random.random() < 0.07:
        return [[0] * num_ranks for _ in range(num_ranks)]
    silent = {r for r in range(num_ranks) if random.random() < 0.1}
    deaf = {r for r in range(num_ranks) if random.random() < 0.1}
    return [
        [0 if s in silent or d in deaf else random.choice(rows) for d in range(num_ranks)]
        for s in range(num_ranks)
    ]


def make_scenario(setting: Setting, random: Random) -> Scenario:
    while True:
        servers, num_local = random.choice(setting.servers), random.choice(setting.gpus_per_server)
        num_ranks = servers * num_local
        if 2 <= num_ranks <= setting.most_ranks:
            break
    layout = FlagLayout(num_ranks, servers, num_local, 64, random.choice(setting.ring_slots))
    chunk_rows, lead = random.randint(1, 3), random.choice(setting.leads)
    calls: list[Call] = []
    names: list[str] = []
    traffic: Traffic = []
    for index in range(random.choice(setting.calls)):
        if index % 2:  # there and back again
            traffic = [list(column) for column in zip(*traffic, strict=True)]
        else:
            traffic = random_traffic(random, num_ranks, setting.rows)
        policy = random.choice(setting.policies)
        lower = plan_whole if policy in PLANNED else plan_shifted
        plan = lower(layout, traffic, chunk_rows, lead, setting.rules, policy)
        calls.append(Call(plan, setting.grows or random.random() < setting.exchange))
        names.append(policy)
    blocks = random.choice(setting.blocks)
    slow = {random.randrange(num_ranks) for _ in range(random.randint(0, 2))}
    text = (
        f"{servers} servers x {num_local} ranks, calls {' '.join(names)}, {blocks} blocks, "
        f"chunks of {chunk_rows} rows, lead {lead}, ring slots {layout.ring_slots}, "
        f"slow ranks {sorted(slow)}"
    )
    return Scenario(
        setting,
        calls,
        blocks,
        slow,
        slowness=random.choice((0.8, 0.97)),
        network_share=random.choice((0.1, 0.3, 0.6)),
        patience=random.choice(setting.patience),
        text=text,
    )
