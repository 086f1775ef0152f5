"""Checks of a profile's values: each failure names its field, as in profiles[0].num_lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

T = TypeVar("T")


class FieldError(ValueError):
    """A value that cannot be; the text says where it stands."""


class Place:
    """A JSON value and the way to it."""

    def __init__(self, value: Any, path: str = "") -> None:
        self.value = value
        self.path = path

    def wrong(self, expected: str) -> FieldError:
        """The error that says what would have been right."""
        shown = repr(self.value)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        return FieldError(f"{self.path or 'the whole'} must be {expected}, not {shown}")

    def fields(self, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Refuse what is no object with these fields."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for name in required:
            if name not in self.value:
                raise FieldError(f"{self._at(name)} is missing")
        for name in self.value:
            if name not in required and name not in optional:
                raise FieldError(f"{self._at(name)} is not a field of this format")

    def field(self, name: str) -> Place:
        """A field of an object; None where it is not there."""
        return Place(self.value.get(name), self._at(name))

    def items(self) -> list[Place]:
        """The items of an array."""
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        return [Place(item, f"{self.path}[{k}]") for k, item in enumerate(self.value)]

    def optional(self, read: Callable[[Place], T]) -> T | None:
        """What `read` makes of it; None for null."""
        return None if self.value is None else read(self)

    def text(self) -> str:
        """A string with something in it."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.wrong("a string that is not empty")
        return self.value

    def truth(self) -> bool:
        """true or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def whole(self, least: int, most: int) -> int:
        """A whole number."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return int(self.value)

    def power_of_two(self, most: int, least: int = 1) -> int:
        """1, 2, 4, ..."""
        value = self.value
        if type(value) is not int or not least <= value <= most or value.bit_count() > 1:
            raise self.wrong(f"a power of two from {least} to {most}")
        return int(value)

    def one_of(self, texts: Sequence[str]) -> str:
        """One of these strings."""
        if self.value not in texts:
            raise self.wrong(f"one of {', '.join(texts)}")
        return str(self.value)

    def time(self) -> str:
        """A time with its zone, as ISO 8601 has it."""
        text = self.text()
        try:
            if datetime.fromisoformat(text.replace("Z", "+00:00")).tzinfo is not None:
                return text
        except ValueError:
            pass
        raise self.wrong("a time with its zone, as 2026-11-30T12:00:00+00:00")

    def _at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
