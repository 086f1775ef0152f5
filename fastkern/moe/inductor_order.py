"""Exchanges in their order under inductor, torch.compile's default backend.

The operators are declared to have an ordered effect. Inductor's graphs keep that order; its
scheduler, as of PyTorch 2.13, notes the order under one name and looks for it under another, and
then moves exchanges that share no data, on some ranks and not on others. So the operators' lowering
here notes it under the right one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree

from .library import ORDERED


def keep_order(operators: Sequence[Any]) -> None:
    """Register the lowerings, once inductor is there; to be called while a graph is traced.

    operators: overloads of operators with an ordered effect.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or operators[0] in lowering.lowerings:
        return
    for operator in operators:
        lowering.register_lowering(operator, type_promotion_kind=None)(_lowering(operator))


def _lowering(operator: Any) -> Any:
    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        before = len(V.graph.operations)
        made = ir.FallbackKernel.create(operator, *args, **kwargs)
        last = V.graph.effectful_ops.get(ORDERED)
        for operation in V.graph.operations[before:]:
            if last is not None and isinstance(operation, ir.FallbackKernel):
                V.graph.additional_buffer_deps[operation.get_operation_name()].add(last.get_name())
        return _pytree.tree_map_only(ir.IRNode, lambda node: node.wrap_for_lowering(), made)

    return lower
