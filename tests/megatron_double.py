"""A double of what Megatron-LM puts around a dispatch manager: enough of its flex dispatcher, its
experts and its ways to run a layer to hold `fastkern.integrations.megatron` to the contract.

Names, shapes and the order of calls are Megatron-LM's (core 0.20.0, August 2026); the module can
stand in sys.modules for megatron.core.transformer.moe.token_dispatcher and for its moe_utils.
"""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# -- configuration and its helpers (moe_utils) -----------------------------------------------------


@dataclass
class Config:
    """The options that a manager may look at. quantized_alignment: 0 without FP8."""

    num_moe_experts: int
    moe_router_topk: int
    moe_flex_dispatcher_backend: str = "ncclep"
    moe_router_padding_for_quantization: bool = False
    moe_pad_expert_input_to_capacity: bool = False
    moe_expert_rank_capacity_factor: float | None = None
    moe_ncclep_zero_copy: bool = False
    moe_dispatch_fwd_dtype: str = "bf16"
    moe_combine_bwd_dtype: str = "bf16"
    overlap_moe_expert_parallel_comm: bool = False
    quantized_alignment: int = 0


def get_align_size_for_quantization(config: Config) -> int:
    return config.quantized_alignment


def skip_routed_expert_padding(config: Config) -> bool:
    """Whether the experts take it that their rows have been padded before."""
    backends = ("hybridep", "ncclep")
    padded = config.moe_flex_dispatcher_backend in backends
    return padded or config.moe_router_padding_for_quantization


# -- managers and dispatcher (token_dispatcher) ----------------------------------------------------


class _DispatchManager(ABC):
    @abstractmethod
    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None: ...

    @abstractmethod
    def dispatch(self, hidden_states: Tensor) -> Tensor: ...

    @abstractmethod
    def combine(self, hidden_states: Tensor) -> Tensor: ...

    @abstractmethod
    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> Any: ...

    @abstractmethod
    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor: ...


class _Uninstalled(_DispatchManager):
    """A manager whose library is not there."""

    def __init__(
        self, group: Any, num_local_experts: int, router_topk: int, num_experts: int, config: Config
    ) -> None:
        raise ImportError("its library is not installed")

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> NoReturn:
        raise NotImplementedError

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> NoReturn:
        raise NotImplementedError

    combine = dispatch

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> NoReturn:
        raise NotImplementedError

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> NoReturn:
        raise NotImplementedError


class _NCCLEPManager(_Uninstalled):
    pass


class _DeepepManager(_Uninstalled):
    pass


@dataclass
class Groups:
    """The part of a process group collection that the dispatcher uses."""

    tp_ep: Any
    tp_size: int
    ep_size: int


class MoEFlexTokenDispatcher:
    """Six steps around the manager; experts' shards (tensor parallelism) count as experts of it.

    shared: not 0: a shared expert that multiplies each token by it.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Config,
        pg_collection: Groups,
    ) -> None:
        self.num_local_experts = num_local_experts
        self.tp_size, self.ep_size = pg_collection.tp_size, pg_collection.ep_size
        self.shared = 0.0
        deepep = config.moe_flex_dispatcher_backend == "deepep"
        manager = _DeepepManager if deepep else _NCCLEPManager
        self._comm_manager: Any = manager(
            group=pg_collection.tp_ep,
            num_local_experts=num_local_experts,
            router_topk=self.tp_size * config.moe_router_topk,
            num_experts=self.tp_size * config.num_moe_experts,
            config=config,
        )

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.hidden_shape = hidden_states.shape
        self._comm_manager.setup_metadata(self._per_rank(routing_map), self._per_rank(probs))
        self.tokens = hidden_states.view(-1, hidden_states.shape[-1])
        return self.tokens, self._comm_manager.token_probs

    def _per_rank(self, multihot: Tensor) -> Tensor:
        """[T, E] -> [T, ranks, local experts]: every tensor-parallel rank gets the same tokens."""
        parts = multihot.reshape(-1, self.ep_size, 1, self.num_local_experts)
        parts = parts.expand(-1, -1, self.tp_size, -1)
        shape = (multihot.shape[0], self.ep_size * self.tp_size, self.num_local_experts)
        return parts.reshape(shape).contiguous()

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._comm_manager.dispatch(tokens, True, True)
        return rows, self._comm_manager.dispatched_probs

    def dispatch_postprocess(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, probs = self._comm_manager.get_permuted_hidden_states_by_experts(rows)
        return rows, self._comm_manager.get_number_of_tokens_per_expert(), probs

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        restored: Tensor = self._comm_manager.get_restored_hidden_states_by_experts(rows)
        return restored

    def token_combine(self, rows: Tensor) -> Tensor:
        tokens: Tensor = self._comm_manager.combine(rows, True, True)
        return tokens

    def combine_postprocess(self, tokens: Tensor) -> Tensor:
        if self.shared:
            tokens += self.shared * self.tokens  # in place, as Megatron adds its shared experts
        return tokens.view(self.hidden_shape)


@contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Megatron-LM as far as `enable` looks, in sys.modules; yields the token_dispatcher module."""
    here = sys.modules[__name__]
    moe = "megatron.core.transformer.moe"
    parts = ["megatron", "megatron.core", "megatron.core.transformer", moe]
    modules = {name: types.ModuleType(name) for name in parts}
    modules |= {f"{moe}.token_dispatcher": here, f"{moe}.moe_utils": here}
    assert not any(name in sys.modules for name in modules)
    sys.modules.update(modules)
    try:
        yield here
    finally:
        for name in modules:
            del sys.modules[name]


# -- experts ---------------------------------------------------------------------------------------


class Experts:
    """This rank's experts, w2 (p * silu(w1 x)): probabilities are applied inside, and only there.

    w1: [local, H, F]; w2: [local, F, H]. padded: rows of an expert must be a multiple of this.
    got: the last call's rows, probabilities and counts.
    """

    def __init__(self, w1: Tensor, w2: Tensor, padded: int = 1) -> None:
        self.w1 = w1.clone().requires_grad_()
        self.w2 = w2.clone().requires_grad_()
        self.padded = padded

    def __call__(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Tensor:
        assert tokens_per_expert.dtype == torch.int64
        assert tokens_per_expert.device.type == "cpu"  # it is split by on the host
        assert probs.shape == rows.shape[:1]
        assert probs.dtype == torch.float32
        self.got = rows.detach().clone(), probs.detach().clone(), tokens_per_expert
        counts = tokens_per_expert.tolist()
        assert all(count % self.padded == 0 for count in counts)
        outs = []
        for e, (x, p) in enumerate(zip(rows.split(counts), probs.split(counts), strict=True)):
            hidden = torch.nn.functional.silu(x @ self.w1[e])
            outs.append((hidden * p[:, None]).to(x.dtype) @ self.w2[e])
        return torch.cat(outs)


# -- ways to run a layer ---------------------------------------------------------------------------


def _forward(
    dispatcher: MoEFlexTokenDispatcher,
    experts: Experts,
    hidden: Tensor,
    routing_map: Tensor,
    probs: Tensor,
) -> Tensor:
    tokens, token_probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    rows, _ = dispatcher.token_dispatch(tokens, token_probs)
    out = experts(*dispatcher.dispatch_postprocess(rows))
    return dispatcher.combine_postprocess(
        dispatcher.token_combine(dispatcher.combine_preprocess(out))
    )


class PlainLayer:
    """Forward through the graph; `backward(grad)` is autograd's."""

    def __init__(self, dispatcher: MoEFlexTokenDispatcher, experts: Experts) -> None:
        self.dispatcher, self.experts = dispatcher, experts

    def forward(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        self.output = _forward(self.dispatcher, self.experts, hidden, routing_map, probs)
        return self.output

    def backward(self, grad: Tensor) -> None:
        self.output.backward(grad)


class RecomputedLayer(PlainLayer):
    """The layer's forward runs again, with its exchanges, at the start of its backward."""

    def forward(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        self.output = checkpoint(
            _forward,
            self.dispatcher,
            self.experts,
            hidden,
            routing_map,
            probs,
            use_reentrant=True,
        )
        return self.output


class OverlappedLayer(PlainLayer):
    """The layer cut into four pieces that micro-batches overlap: graphs end at each cut, the
    manager's probabilities are replaced by detached ones, and combine's input is freed.
    """

    def forward(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        dispatcher, manager = self.dispatcher, self.dispatcher._comm_manager
        self.before = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        self.tokens, self.token_probs = _cut(*self.before)
        manager.token_probs = self.token_probs
        self.sent = dispatcher.token_dispatch(self.tokens, self.token_probs)
        self.rows, self.row_probs = _cut(*self.sent)
        manager.dispatched_probs = self.row_probs
        self.out = dispatcher.combine_preprocess(
            self.experts(*dispatcher.dispatch_postprocess(self.rows))
        )
        (self.summand,) = _cut(self.out)
        self.output = dispatcher.combine_postprocess(dispatcher.token_combine(self.summand))
        self.summand.untyped_storage().resize_(0)
        return self.output.detach()

    def backward(self, grad: Tensor) -> None:
        self.output.backward(grad)
        self.out.backward(self.summand.grad)
        torch.autograd.backward(self.sent, (self.rows.grad, self.row_probs.grad))
        torch.autograd.backward(self.before, (self.tokens.grad, self.token_probs.grad))


def _cut(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


LAYERS = {"plain": PlainLayer, "recomputed": RecomputedLayer, "overlapped": OverlappedLayer}
