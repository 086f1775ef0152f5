"""What one step finds, written again after every finding: a step that is killed leaves the rest.

Standard library only, as the report reads it where nothing else could be installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Record:
    """Findings of a step: cases (right or wrong), measures, and facts by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = {"cases": [], "measures": [], "facts": {}}
        self._save()

    def add_case(self, group: str, name: str, ok: bool, seconds: float, error: str = "") -> None:
        """A correctness case that has run; error: why it is not right."""
        self.content["cases"].append(
            {"group": group, "name": name, "ok": ok, "seconds": round(seconds, 3), "error": error}
        )
        self._save()

    def add_measure(self, name: str, case: str, **figures: Any) -> None:
        """A measured thing; figures: see perf/README.md."""
        self.content["measures"].append({"name": name, "case": case, **figures})
        self._save()

    def add_facts(self, **facts: Any) -> None:
        """What the report shows or keeps besides."""
        self.content["facts"].update(facts)
        self._save()

    def _save(self) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(self.content))
        temporary.replace(self._path)


def read_record(path: Path) -> dict[str, Any]:
    """A step's findings; empty ones where it left none."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"cases": [], "measures": [], "facts": {}}
    return content
