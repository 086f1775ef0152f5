"""What a block that has lost a claim may take next, of every queue."""

from __future__ import annotations

from fastkern.planner.table import QUEUES
from tests.triton import runnable_cases as cases
from tests.triton.interpreted import Interpreter


def test_items_after_a_head(interpreter: Interpreter) -> None:
    wrong, counts, past_empty = interpreter.run(cases.run, 1)
    assert wrong == []
    assert set(counts) == set(QUEUES)
    for queue, of_queue in counts.items():
        assert sum(of_queue[1:]) > 0, f"{queue}: none could run: {counts}"
    assert past_empty > 0
