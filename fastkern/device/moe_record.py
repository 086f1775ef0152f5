"""MoeArgs in Python, with the methods of _host.MoeArgs."""

from __future__ import annotations

from typing import Any

import torch

from ..moe.tensor_checks import VALUE_KINDS
from .records import MOE_ARGS, new_record

_FLOAT64 = VALUE_KINDS[torch.float64]


class MoeRecord:
    """Arguments of one dispatch or combine. kernel: that takes them. record: one MOE_ARGS."""

    def __init__(self) -> None:
        self.kernel = ""
        self.record: Any = new_record(MOE_ARGS)

    def add_part(self, input: int, output: int, row_bytes: int, offset: int) -> None:
        """A tensor of a dispatch: addresses, bytes of its row, and where that lies in a row."""
        part = self.record["parts"][int(self.record["num_parts"])]
        part["input"], part["output"] = input, output
        part["row_bytes"], part["offset"] = row_bytes, offset
        self.record["num_parts"] += 1

    def set_dispatch(self, **fields: int) -> None:
        """What a dispatch needs besides; fields by their names in MoeArgs."""
        self.kernel = "fastkern_dispatch"
        self._set(fields)

    def set_combine(self, **fields: int) -> None:
        """What a combine needs."""
        doubles = fields["value_kind"] == _FLOAT64
        self.kernel = "fastkern_combine_float64" if doubles else "fastkern_combine"
        self._set(fields)

    def _set(self, fields: dict[str, int]) -> None:
        for name, value in fields.items():
            self.record[name] = value
