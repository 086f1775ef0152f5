"""Tuning profiles: what a file may say, which profile counts, and what is refused, by its field."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fastkern.tuning
from fastkern.config import read_profile_path
from fastkern.tuning.blocks import BlockCounts
from fastkern.tuning.profile import Profile, SizeRule, format_profiles, parse_profiles
from fastkern.tuning.store import (
    BUILT_IN,
    built_in_profiles,
    find_profile,
    read_profiles,
    save_profile,
)

RULES = {
    "dispatch": (SizeRule(1 << 16, 4), SizeRule(1 << 20, 9)),
    "combine": (SizeRule(1, 1),),
}
MEASURED = Profile(
    architecture="sm_90",
    transport="peer",
    device_name="Some GPU",
    measured=True,
    measured_with="a test",
    measured_at="2026-11-30T12:00:00+00:00",
    num_blocks=20,
    num_lanes=256,
    chunk_bytes=1 << 16,
    operations=RULES,
)
TRITON = Profile(
    architecture="sm_90",
    transport="peer",
    num_blocks=16,
    num_lanes=128,
    kernels="triton",
    tile_bytes=8192,
)


def schema() -> Any:
    text = files(fastkern.tuning).joinpath("profile.schema.json").read_text(encoding="utf-8")
    return json.loads(text)


def is_of_schema(content: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema()).is_valid(content))


# -- files -----------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    profiles = [MEASURED, Profile(), Profile(architecture="host", num_blocks=3), TRITON]
    text = format_profiles(profiles)
    assert parse_profiles(text) == profiles
    assert is_of_schema(json.loads(text))
    fields = [set(profile) for profile in json.loads(text)["profiles"]]
    assert fields[3] - fields[0] == {"kernels", "tile_bytes"}  # earlier releases read the others


def test_kernels_have_profiles_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order and the key: a profile of other kernels never counts."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("FASTKERN_PROFILE", str(path))
    where = ("sm_90", "NVIDIA H200", "peer")
    cxx = replace(TRITON, kernels="cxx", tile_bytes=None, num_blocks=2)
    save_profile(path, TRITON)
    found, source = find_profile(*where)
    assert (found.kernels, source) == ("cxx", BUILT_IN)
    save_profile(path, cxx)
    assert find_profile(*where) == (cxx, str(path))
    assert find_profile(*where, kernels="triton") == (TRITON, str(path))
    changed = replace(TRITON, tile_bytes=4096)
    save_profile(path, changed)
    assert read_profiles(path) == [cxx, changed]
    save_profile(path, replace(cxx, architecture="gfx942"))
    monkeypatch.setenv("FASTKERN_PROFILE", "built-in")
    assert find_profile(*where, kernels="triton")[0].kernels == "triton"


def test_what_is_built_in_is_a_guess_and_says_so() -> None:
    built_in = built_in_profiles()
    assert is_of_schema(json.loads(format_profiles(built_in)))
    assert not any(profile.measured for profile in built_in)
    assert all((profile.measured_with or "").startswith("nothing") for profile in built_in)
    assert built_in[0].key == (None, None, None)


Edit = Callable[[dict[str, Any]], Any]
_AT = "profiles[0]"


def set_(name: str, value: Any) -> Edit:
    return lambda whole: whole["profiles"][0].update({name: value})


def rule(**changes: Any) -> Edit:
    return lambda whole: whole["profiles"][0]["operations"]["dispatch"][1].update(changes)


def without(name: str) -> Edit:
    return lambda whole: whole["profiles"][0].pop(name)


# name: (what changes, words of the error, whether the schema can say so too)
BAD: dict[str, tuple[Edit, str, bool]] = {
    "another format": (lambda w: w.update(format="other"), "format", True),
    "no format": (lambda w: w.pop("format"), "format", True),
    "a later version": (lambda w: w.update(version=2), "version is 2", True),
    "a version by truth": (lambda w: w.update(version=True), "version is True", True),
    "no version": (lambda w: w.pop("version"), "version is None", True),
    "no profiles": (lambda w: w.pop("profiles"), "profiles is missing", True),
    "profiles no list": (lambda w: w.update(profiles={}), "profiles must be an array", True),
    "a further field": (lambda w: w.update(more=1), "more is not a field", True),
    "twice": (lambda w: w["profiles"].append(w["profiles"][0]), "profiles[1] is for", False),
    "no object": (lambda w: w.update(profiles=[3]), f"{_AT} must be an object", True),
    "a misspelt field": (set_("num_block", 3), f"{_AT}.num_block is not a field", True),
    "a field missing": (without("num_lanes"), f"{_AT}.num_lanes is missing", True),
    "no blocks": (set_("num_blocks", 0), f"{_AT}.num_blocks must be a whole", True),
    "too many blocks": (set_("num_blocks", 1025), f"{_AT}.num_blocks must be", True),
    "blocks by truth": (set_("num_blocks", True), f"{_AT}.num_blocks must be", True),
    "half a lane": (set_("num_lanes", 0.5), f"{_AT}.num_lanes must be", True),
    "lanes in words": (set_("num_lanes", "many"), f"{_AT}.num_lanes must be", True),
    "other kernels": (set_("kernels", "ptx"), f"{_AT}.kernels must be one of cxx, triton", True),
    "kernels by number": (set_("kernels", 1), f"{_AT}.kernels must be one of", True),
    "tiles in C++": (set_("tile_bytes", 4096), f"{_AT}.tile_bytes must be null: only", True),
    "lanes of no block": (
        lambda w: w["profiles"][0].update(kernels="triton", num_lanes=96),
        f"{_AT}.num_lanes must be a power of two",
        True,
    ),
    "an odd tile": (
        lambda w: w["profiles"][0].update(kernels="triton", tile_bytes=4097),
        f"{_AT}.tile_bytes must be a power of two from 16",
        True,
    ),
    "a small tile": (
        lambda w: w["profiles"][0].update(kernels="triton", tile_bytes=8),
        f"{_AT}.tile_bytes must be a power of two from 16",
        True,
    ),
    "no chunk": (set_("chunk_bytes", 0), f"{_AT}.chunk_bytes must be", True),
    "a huge chunk": (set_("chunk_bytes", 1 << 63), f"{_AT}.chunk_bytes must be", True),
    "no architecture": (set_("architecture", " "), f"{_AT}.architecture must be", True),
    "a numbered transport": (set_("transport", 5), f"{_AT}.transport must be a string", True),
    "measured in words": (set_("measured", "yes"), f"{_AT}.measured must be true", True),
    "measured with nothing": (without("measured_with"), f"{_AT}.measured_with is missing", True),
    "measured never": (set_("measured_at", None), f"{_AT}.measured_at is missing", True),
    "measured in spring": (set_("measured_at", "spring"), f"{_AT}.measured_at must be", True),
    "no zone": (set_("measured_at", "2026-11-30T12:00:00"), f"{_AT}.measured_at must be", True),
    "a foreign operation": (
        set_("operations", {"reduce": []}),
        f"{_AT}.operations.reduce is not a field",
        True,
    ),
    "rules no list": (
        set_("operations", {"combine": 4}),
        f"{_AT}.operations.combine must be an array",
        True,
    ),
    "no size": (
        lambda w: w["profiles"][0]["operations"]["dispatch"][1].pop("up_to_bytes"),
        "dispatch[1].up_to_bytes is missing",
        True,
    ),
    "size 3": (rule(up_to_bytes=3 << 20), "dispatch[1].up_to_bytes must be a power", False),
    "smaller": (rule(up_to_bytes=1024), "dispatch[1].up_to_bytes must be more than 65536", False),
    "as large": (rule(up_to_bytes=1 << 16), "up_to_bytes must be more than 65536", False),
    "blocks of a rule": (rule(num_blocks=-1), "dispatch[1].num_blocks must be", True),
    "lanes of a rule": (rule(num_lanes=64), "dispatch[1].num_lanes is not a field", True),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_its_field(name: str, tmp_path: Path) -> None:
    change, words, by_schema = BAD[name]
    whole = json.loads(format_profiles([MEASURED]))
    change(whole)
    assert is_of_schema(whole) == (not by_schema)
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="tuning profile") as caught:
        read_profiles(path)
    assert str(caught.value).startswith(f"tuning profile {path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff\xfe", "utf-8"),
        (b"[" * 100_000, "nested"),
        (b'{"format": NaN}', "NaN"),
        (b'{"version": 1, "version": 1}', "version is there twice"),
        (b"[1, 2]", "format"),
        (b"null", "format"),
    ],
    ids=str,
)
def test_what_is_no_profile_at_all(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="tuning profile") as caught:
        read_profiles(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=words) as caught:
            read_profiles(path)
        assert str(path) in str(caught.value)


def test_saving_keeps_what_is_for_other_devices(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuning.json"
    save_profile(path, MEASURED)
    other = Profile(architecture="gfx942", num_blocks=7)
    save_profile(path, other)
    again = Profile(**{**vars(MEASURED), "num_blocks": 21})
    save_profile(path, again)
    assert read_profiles(path) == [other, again]
    assert [p.name for p in path.parent.iterdir()] == ["tuning.json"]
    path.write_text("{broken")
    with pytest.raises(ValueError, match=str(path)):
        save_profile(path, MEASURED)
    assert path.read_text() == "{broken"
    with pytest.raises(ValueError, match="tuning profile"):
        save_profile(path / "below a file", MEASURED)


# -- which one counts ------------------------------------------------------------------------------


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a file of profiles the user's."""

    def use_profiles(*profiles: Profile) -> None:
        path = tmp_path / "tuning.json"
        path.write_text(format_profiles(profiles))
        monkeypatch.setenv("FASTKERN_PROFILE", str(path))

    return use_profiles


def test_the_most_specific_profile_wins(use: Callable[..., None]) -> None:
    keys = [
        (None, None, None),
        (None, None, "peer"),
        (None, "Some GPU", None),
        (None, "Some GPU", "peer"),
        ("sm_90", None, None),
        ("sm_90", None, "peer"),
        ("sm_90", "Some GPU", None),
        ("sm_90", "Some GPU", "peer"),
        ("sm_90", "Another GPU", "peer"),
        ("sm_100", None, "peer"),
        ("sm_90", None, "nvshmem"),
    ]
    profiles = [
        Profile(architecture=a, device_name=d, transport=t, num_blocks=k + 1)
        for k, (a, d, t) in enumerate(keys)
    ]
    fitting = profiles[:8]
    while fitting:
        others = [p for p in profiles if p not in profiles[:8]]
        use(*reversed(others), *fitting[::2], *fitting[1::2])
        found, source = find_profile("sm_90", "Some GPU", "peer")
        assert found == fitting.pop()
        assert source.endswith("tuning.json")
    use(*profiles[8:])
    found, source = find_profile("sm_90", "Some GPU", "peer")
    assert (found, source) == (built_in_profiles()[0], BUILT_IN)


def test_where_the_users_file_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FASTKERN_PROFILE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for folder in (tmp_path / ".config", tmp_path / "mine"):
        if folder.name == "mine":
            monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
            monkeypatch.setitem(sys.modules, "platformdirs", None)
        path = folder / "fastkern" / "tuning.json"
        assert read_profile_path() == (path, False)
        assert find_profile("sm_90", "Some GPU", "peer")[1] == BUILT_IN
        save_profile(path, MEASURED)
        assert find_profile("sm_90", "Some GPU", "peer") == (MEASURED, str(path))
        monkeypatch.setenv("FASTKERN_PROFILE", "built-in")
        assert find_profile("sm_90", "Some GPU", "peer")[1] == BUILT_IN
        monkeypatch.setenv("FASTKERN_PROFILE", str(path.with_name("none.json")))
        with pytest.raises(ValueError, match=r"none\.json: No such file"):
            find_profile("sm_90", "Some GPU", "peer")
        monkeypatch.delenv("FASTKERN_PROFILE")
    monkeypatch.setenv("FASTKERN_PROFILE", "~nobody-of-that-name/tuning.json")
    with pytest.raises(ValueError, match="FASTKERN_PROFILE"):
        read_profile_path()


# -- blocks ----------------------------------------------------------------------------------------


def test_blocks_by_operation_and_size() -> None:
    sizes = (0, 1, 2, 1 << 16, (1 << 16) + 1, 1 << 20, 1 << 40)
    found = {op: [MEASURED.blocks_of(op, size) for size in sizes] for op in (*RULES, "other")}
    assert found == {
        "dispatch": [4, 4, 4, 4, 9, 9, 20],
        "combine": [1, 1, 20, 20, 20, 20, 20],
        "other": [20] * 7,
    }
    assert MEASURED.most_blocks(2) == 20
    assert Profile(operations=RULES).most_blocks(2) == 9
    assert Profile(operations=RULES).most_blocks(12) == 12
    counts = BlockCounts(7, lambda op, size: size)
    assert [counts.of(None, "dispatch", size) for size in (1, 7, 8)] == [1, 7, 7]
    assert [counts.of(3, "dispatch", size) for size in (1, 7, 8)] == [3, 3, 3]
