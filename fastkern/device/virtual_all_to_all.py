"""An all-to-all of a virtual cluster: buffers of all ranks, plan, launches, graph replays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FastkernError
from ..planner import Plan, StageTable, plan
from .virtual_memory import tensor_bytes

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


class AllToAll:
    """One prepared call. Inputs and outputs stay where they are; splits may change between runs.

    See VirtualCluster.prepare_all_to_all. input, output: addresses per rank. plan: of the splits.
    """

    def __init__(
        self,
        cluster: VirtualRuntime,
        splits: npt.ArrayLike,
        row_bytes: int,
        most_rows: int | None,
        table_bytes: int,
    ) -> None:
        self._cluster = cluster
        self.row_bytes = row_bytes
        self.plan, self.splits, tables = self._planned(splits)
        self._graph: int | None = None
        self._rows_in = [int(n) if most_rows is None else most_rows for n in self._sent]
        self._rows_out = [int(n) if most_rows is None else most_rows for n in self._received]
        self._check_rows()
        with ExitStack() as made:
            self._memory = cluster.allocations(poisoned=True)
            made.callback(self._memory.close)
            empty, size = self._memory.empty, row_bytes
            self.input = [empty(n * size, f"input {r}") for r, n in enumerate(self._rows_in)]
            self.output = [empty(n * size, f"output {r}") for r, n in enumerate(self._rows_out)]
            self.launch = cluster.prepare("fastkern_exchange", tables, table_bytes)
            made.callback(self.launch.close)
            self.launch.args["input"] = self.input
            self.launch.args["output"] = self.output
            made.callback(self._destroy_graph)
            self._owned = made.pop_all()

    def close(self) -> None:
        """Free its memory. A second call does nothing."""
        self._owned.close()

    # -- rows --------------------------------------------------------------------------------------

    def write_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Per rank a CPU tensor whose first dimension is rows, as many as the splits say."""
        for rank, (x, rows) in enumerate(zip(inputs, self._sent, strict=True)):
            content = tensor_bytes(x.contiguous())
            if len(x) != rows or len(content) != rows * self.row_bytes:
                raise ValueError(
                    f"input of rank {rank} has {len(x)} rows and {len(content)} bytes, its splits "
                    f"are for {rows} rows of {self.row_bytes} bytes"
                )
            self._cluster.copier.write(self.input[rank], content)

    def read_outputs(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Per rank the rows received, [rows, *shape]; checks the guards."""
        self._memory.check_guards()
        tensor = self._memory.tensor
        return [
            tensor(address, (int(rows), *shape), dtype)
            for address, rows in zip(self.output, self._received, strict=True)
        ]

    def poison_outputs(self) -> None:
        """Fill the outputs as the cluster's options say, if they do."""
        value = self._cluster.options.fill_byte
        if value is not None:
            for address, rows in zip(self.output, self._rows_out, strict=True):
                driver, stream = self._cluster.driver, self._cluster.stream
                driver.fill(address, value, rows * self.row_bytes, stream)

    # -- plans -------------------------------------------------------------------------------------

    def set_splits(self, splits: npt.ArrayLike) -> None:
        """Plan other splits into the same room. Raises ValueError where they need more."""
        before = self.plan, self.splits
        try:
            self.plan, self.splits, tables = self._planned(splits)
            self._check_rows()
            self.launch.set_tables(tables)
        except BaseException:
            self.plan, self.splits = before
            raise
        self._cluster.reserve(tables)

    def _planned(
        self, splits: npt.ArrayLike
    ) -> tuple[Plan, npt.NDArray[np.int64], list[StageTable]]:
        cluster = self._cluster
        options = cluster.options
        made = plan(
            splits,
            cluster.topology,
            self.row_bytes,
            options.policy,
            chunk_bytes=options.chunk_bytes,
        )
        tables = [made.table(rank) for rank in range(cluster.num_ranks)]
        return made, np.array(splits, dtype=np.int64), tables

    @property
    def _sent(self) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = self.splits.sum(axis=1)
        return rows

    @property
    def _received(self) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = self.splits.sum(axis=0)
        return rows

    def _check_rows(self) -> None:
        for text, rows, room in (
            ("sends", self._sent, self._rows_in),
            ("receives", self._received, self._rows_out),
        ):
            for rank, (has, most) in enumerate(zip(rows, room, strict=True)):
                if has > most:
                    raise ValueError(f"rank {rank} {text} {has} rows, its room is {most}")

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Launch, and wait for the end."""
        self.poison_outputs()
        self._cluster.run(self.launch, "all_to_all")

    def capture(self) -> None:
        """Record copy and kernel into a graph, for `replay`. Nothing runs."""
        self._cluster.check()
        driver, stream = self._cluster.driver, self._cluster.stream
        driver.synchronize(stream)
        self._destroy_graph()
        driver.begin_capture(stream)
        try:
            self._cluster.enqueue(self.launch)
        finally:
            self._graph = driver.end_capture(stream)

    def enqueue_replay(self) -> None:
        """Put the graph into the stream."""
        if self._graph is None:
            raise FastkernError("nothing was captured")
        self._cluster.driver.replay(self._graph, self._cluster.stream)

    def replay(self) -> None:
        """Run what was captured, with the tables and inputs of now; wait for the end."""
        self._cluster.check()
        self.poison_outputs()
        self._cluster.poison()
        self.enqueue_replay()
        self._cluster.finish("all_to_all", self._cluster.epoch + 1)

    def _destroy_graph(self) -> None:
        if self._graph is not None:
            self._cluster.driver.destroy_graph(self._graph)
            self._graph = None
