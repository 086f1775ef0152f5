"""What stands in the rows that a static dispatch has received, for gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..moe.static_shape import StaticShape
from .static_site import StaticSite

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime


class ReceivedRows:
    """Of the last dispatch. num_rows: of its outputs. idx: recv_topk_idx, rank layout only."""

    def __init__(
        self, runtime: DeviceRuntime, site: StaticSite, shape: StaticShape, num_rows: int
    ) -> None:
        self.idx: torch.Tensor | None = None
        self._runtime = runtime
        self._site = site
        self._topk = shape.topk
        self._num_rows = num_rows

    def forget(self, stream: int) -> None:
        """Before a dispatch: what it does not write says that nothing was received."""
        at, num_bytes = self._site.memory.window_slots(0)
        self._runtime.driver.fill(at, 0xFF, num_bytes, stream)

    def missing(self) -> torch.Tensor:
        """bool [num_rows]: nothing was received there."""
        if self.idx is not None:
            return (self.idx < 0).all(1)
        return self._choices() < 0

    def by_choice(self, values: torch.Tensor) -> torch.Tensor:
        """[num_rows, K]: a row's value in the column of the choice that it stands for.

        values: [num_rows]; rank layout: [num_rows, K], kept where there is a choice.
        """
        if self.idx is not None:
            return torch.where(self.idx >= 0, values, 0)
        columns = torch.arange(self._topk, device=values.device)
        return torch.where(self._choices().unsqueeze(1) == columns, values.unsqueeze(1), 0)

    def _choices(self) -> torch.Tensor:
        """int64 [num_rows]: which of its token's choices a row is; -1: none. Expert layout."""
        slots = self._window_slots().to(torch.int64)
        choices = torch.arange(self._topk, device=slots.device).repeat(len(slots) // self._topk)
        made = torch.full((self._num_rows + 1,), -1, dtype=torch.int64, device=slots.device)
        # Those that are not there, -1 as signed numbers, go to the row past the end.
        places = torch.where(slots < 0, self._num_rows, slots)
        return made.scatter_(0, places, choices)[: self._num_rows]

    def _window_slots(self) -> torch.Tensor:
        """int32 [window rows * K], a copy of the handle's."""
        at, num_bytes = self._site.memory.window_slots(0)
        made = torch.empty(num_bytes // 4, dtype=torch.int32, device=self._runtime.device)
        streams = self._runtime.streams
        self._runtime.driver.copy(made.data_ptr(), at, num_bytes, streams.current())
        streams.settle(made)
        return made
