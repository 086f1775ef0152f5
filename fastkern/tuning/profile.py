"""Tuning profiles: launch parameters per device and transport, and the JSON file that holds them.

    {"format": "fastkern-tuning", "version": 1, "profiles": [{
        "architecture": "sm_90", "transport": "peer", "device_name": "NVIDIA H200",
        "measured": true, "measured_with": "...", "measured_at": "2026-11-30T12:00:00+00:00",
        "num_blocks": 22, "num_lanes": 512, "chunk_bytes": 131072,
        "operations": {"dispatch": [{"up_to_bytes": 65536, "num_blocks": 4}]}}]}

A null of a parameter leaves it to the runtime; a null of architecture, transport or device_name
stands for any. A profile for the kernels in Triton has "kernels": "triton", and may have
"tile_bytes"; others are for those in C++. profile.schema.json says the same to tools; here is what
is read and refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fields import FieldError, Place

FORMAT = "fastkern-tuning"
VERSION = 1
OPERATIONS = ("all_to_all_single", "dispatch", "combine")
MOST_BLOCKS = 1024
MOST_LANES = 1024
MOST_BYTES = 1 << 62
KERNELS = ("cxx", "triton")
LEAST_TILE_BYTES, MOST_TILE_BYTES = 16, 1 << 17


@dataclass(frozen=True)
class SizeRule:
    """Blocks of calls in which a rank gives and gets at most up_to_bytes, a power of two."""

    up_to_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Profile:
    """Launch parameters for one kind of device.

    architecture ("sm_90", "gfx942", "host"), transport, device_name (as the driver has it): what it
    is for; None: any. measured: else it is a guess. measured_with, measured_at: how and when, ISO
    8601. num_blocks: of a launch, where no rule says otherwise. num_lanes: of a block. chunk_bytes:
    size that puts are cut into. tile_bytes: that a block moves at a time. None: the runtime's
    default. operations: rules by operation, sizes ascending; the first that a call fits in counts.
    kernels: those that it is for, see device.driver.Driver; only those in Triton have tiles.
    """

    architecture: str | None = None
    transport: str | None = None
    device_name: str | None = None
    measured: bool = False
    measured_with: str | None = None
    measured_at: str | None = None
    num_blocks: int | None = None
    num_lanes: int | None = None
    chunk_bytes: int | None = None
    operations: Mapping[str, tuple[SizeRule, ...]] = field(default_factory=dict)
    kernels: str = "cxx"
    tile_bytes: int | None = None

    @property
    def key(self) -> tuple[str | None, str | None, str | None]:
        """The device that it is for."""
        return self.architecture, self.device_name, self.transport

    def replaces(self, other: Profile) -> bool:
        """Whether both are for the same device and kernels."""
        return (self.key, self.kernels) == (other.key, other.kernels)

    def blocks_of(self, op: str, num_bytes: int) -> int | None:
        """Blocks of a call of an operation in which a rank gives or gets so many bytes."""
        for rule in self.operations.get(op, ()):
            if num_bytes <= rule.up_to_bytes:
                return rule.num_blocks
        return self.num_blocks

    def most_blocks(self, default: int) -> int:
        """The most of any call, where the runtime's default is this."""
        rules = [rule.num_blocks for rules in self.operations.values() for rule in rules]
        return max([self.num_blocks or default, *rules])

    def to_json(self) -> dict[str, Any]:
        """As the file has it, and earlier releases read it."""
        made = dict(vars(self))
        if self.kernels == "cxx":
            del made["kernels"], made["tile_bytes"]
        made["operations"] = {
            op: [dict(vars(rule)) for rule in rules] for op, rules in self.operations.items()
        }
        return made


def parse_profiles(text: str) -> list[Profile]:
    """The profiles of a file. Raises ValueError with the field and what is wrong with it."""
    try:
        read = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise FieldError("not a profile: nested too deeply") from None
    whole = Place(read)
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise FieldError(f'not a tuning profile: format must be "{FORMAT}"')
    version = read.get("version")
    if type(version) is not int or version != VERSION:
        raise FieldError(f"version is {version!r}, this fastkern reads version {VERSION}")
    whole.fields(("format", "version", "profiles"))
    profiles: list[Profile] = []
    for place in whole.field("profiles").items():
        profile = _profile(place)
        if any(profile.replaces(other) for other in profiles):
            raise FieldError(f"{place.path} is for the same device and transport as one before it")
        profiles.append(profile)
    return profiles


def format_profiles(profiles: Sequence[Profile]) -> str:
    """The text of a file with these profiles."""
    content = [profile.to_json() for profile in profiles]
    whole = {"format": FORMAT, "version": VERSION, "profiles": content}
    return json.dumps(whole, indent=2) + "\n"


_KEYS = ("architecture", "transport", "device_name", "measured")
_PARAMETERS = ("num_blocks", "num_lanes", "chunk_bytes")
_NOTES = ("measured_with", "measured_at")


def _profile(place: Place) -> Profile:
    place.fields((*_KEYS, *_PARAMETERS), (*_NOTES, "operations", "kernels", "tile_bytes"))
    kernels = place.field("kernels").optional(lambda p: p.one_of(KERNELS)) or "cxx"
    if kernels == "cxx" and place.value.get("tile_bytes") is not None:
        raise place.field("tile_bytes").wrong("null: only kernels in Triton have tiles")
    measured = place.field("measured").truth()
    for name in _NOTES:
        if measured and place.value.get(name) is None:
            raise FieldError(f"{place.field(name).path} is missing: the profile was measured")
    return Profile(
        architecture=place.field("architecture").optional(Place.text),
        transport=place.field("transport").optional(Place.text),
        device_name=place.field("device_name").optional(Place.text),
        measured=measured,
        measured_with=place.field("measured_with").optional(Place.text),
        measured_at=place.field("measured_at").optional(Place.time),
        num_blocks=place.field("num_blocks").optional(lambda p: p.whole(1, MOST_BLOCKS)),
        num_lanes=place.field("num_lanes").optional(
            lambda p: p.whole(1, MOST_LANES) if kernels == "cxx" else p.power_of_two(MOST_LANES)
        ),
        chunk_bytes=place.field("chunk_bytes").optional(lambda p: p.whole(1, MOST_BYTES)),
        operations=place.field("operations").optional(_operations) or {},
        kernels=kernels,
        tile_bytes=place.field("tile_bytes").optional(
            lambda p: p.power_of_two(MOST_TILE_BYTES, LEAST_TILE_BYTES)
        ),
    )


def _operations(place: Place) -> dict[str, tuple[SizeRule, ...]]:
    place.fields((), OPERATIONS)
    made = {}
    for op in place.value:
        rules: list[SizeRule] = []
        for item in place.field(op).items():
            item.fields(("up_to_bytes", "num_blocks"))
            size = item.field("up_to_bytes")
            rule = SizeRule(
                size.power_of_two(MOST_BYTES), item.field("num_blocks").whole(1, MOST_BLOCKS)
            )
            if rules and rule.up_to_bytes <= rules[-1].up_to_bytes:
                raise size.wrong(f"more than {rules[-1].up_to_bytes}, which comes before it")
            rules.append(rule)
        made[op] = tuple(rules)
    return made


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FieldError(f"{twice} is there twice in one object")
    return made


def _constant(name: str) -> Any:
    raise FieldError(f"{name} is no JSON")
