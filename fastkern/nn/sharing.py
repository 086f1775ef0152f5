"""Models with spread layers in a training loop: weights in and out, gradients over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .layer import ExpertParallelMoE


def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take this rank's part of the state dict of the same model whole in one process.

    Raises KeyError where `state` lacks a name that this rank has; others it may have.
    """
    model.load_state_dict({name: state[name] for name in model.state_dict()})


def whole_state(model: nn.Module, group: Any = None) -> dict[str, Tensor]:
    """The state dict of the model as if whole in one process: every rank's experts, on each rank.

    group: of the ranks that the experts are spread over. Collective. What ranks have alike is this
    rank's. For models that fit into one process: checkpoints of small ones, and tests.
    """
    own = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    parts: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, {name: own[name] for name in _of_experts(model)}, group=group)
    return own | {name: value for part in parts for name, value in part.items()}


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that every rank has: all but those of the experts in its MoE layers."""
    spread = _of_experts(model)
    return [p for name, p in model.named_parameters() if name not in spread]


def sum_gradients(parameters: Iterable[nn.Parameter], group: Any = None) -> None:
    """Add up the gradients of replicated parameters over the ranks of `group`. Collective.

    One all-reduce per dtype. A parameter without a gradient here counts as zero and has one after;
    one that requires none is left alone.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for parts in by_dtype.values():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for p, grad in zip(parts, torch.split(flat, [p.numel() for p in parts]), strict=True):
            p.grad = grad.view_as(p)


def _of_experts(model: nn.Module) -> set[str]:
    """Names, as in the state dict, of everything that belongs to experts of this rank."""
    return {
        f"{prefix}{name}"
        for path, module in model.named_modules()
        if isinstance(module, ExpertParallelMoE)
        for prefix in [f"{path}.experts." if path else "experts."]
        for name in module.experts.state_dict()
    }
