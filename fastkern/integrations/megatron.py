"""Megatron-LM: a dispatch manager for its flex token dispatcher (`MoEFlexTokenDispatcher`).

    import fastkern.integrations.megatron
    fastkern.integrations.megatron.enable()  # before the model is built

What the dispatcher asks of its manager, per MoE layer and micro-batch (R ranks, T tokens, E experts
over all ranks, K = router top-k, H hidden), in this order:

    setup_metadata(routing_map, probs)              [T, R, E / R] each; leaves token_probs [T, K]
    dispatch(hidden_states)                         [T, H] -> [rows, H]; leaves dispatched_probs
    get_permuted_hidden_states_by_experts(rows)     -> [rows, H], probabilities [rows]
    get_number_of_tokens_per_expert()               -> int64 [E / R]
    (the experts: activations times probabilities)
    get_restored_hidden_states_by_experts(output)   [rows, H] -> [rows, H]
    combine(output)                                 [rows, H] -> [T, H]

Layout: the expert layout. Rows arrive grouped by expert and padded to the alignment that the
experts ask for, so permuting and restoring are nothing, and no copy is made between the exchange
and the grouped matrix product. The rank layout moves as little between servers (a token crosses
once in both), but its rows would have to be permuted here, and back, as a pass of its own.

Weights: Megatron multiplies by the probabilities inside the experts, so combine sums without any.
They travel with the rows instead, and their gradient comes back the same way.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastkern.errors import FastkernError
from fastkern.ops import communicator_of

log = logging.getLogger("fastkern")

# The managers whose place can be taken: both are made with these arguments.
_PLACES = {"ncclep": "_NCCLEPManager", "deepep": "_DeepepManager"}
_ARGUMENTS = ["group", "num_local_experts", "router_topk", "num_experts", "config"]
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"


class DispatchManager:
    """Exchanges the tokens of one MoE layer; what Megatron calls a dispatch manager.

    group: the process group that the experts are spread over (Megatron: tensor times expert
    parallel ranks). num_local_experts: experts of this rank, the same on all. router_topk: the most
    experts that a token goes to, K. num_experts: E, over all ranks; with expert tensor parallelism
    Megatron counts each shard of an expert as one, in E and in K.
    expert_alignment: rows of an expert are padded up to a multiple, with zeros, and
    tokens_per_expert then counts the padding too. wire_dtype: of sums between servers (see
    Communicator.combine). communicator: by default the group's own, made on first use; use
    `fastkern.init(group, ...)` to give it options.

    Attributes that Megatron reads, and replaces by detached ones where it cuts the graph:
    token_probs [T, K] and token_indices int64 [T, K] (-1: none) between setup_metadata and
    dispatch; dispatched_probs [rows] between dispatch and the experts. float32, or float64 where
    the router's are.

    Raises ValueError where experts and ranks do not fit.
    """

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        *,
        expert_alignment: int = 1,
        wire_dtype: torch.dtype | None = None,
        communicator: Any = None,
    ) -> None:
        num_ranks = dist.get_world_size(group)
        if num_local_experts * num_ranks != num_experts:
            raise ValueError(
                f"{num_experts} experts are not {num_local_experts} on each of {num_ranks} ranks"
            )
        if not 1 <= router_topk <= num_experts:
            raise ValueError(f"router_topk is {router_topk}, with {num_experts} experts")
        self.group = group
        self.num_local_experts = num_local_experts
        self.router_topk = router_topk
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.wire_dtype = wire_dtype
        self.token_indices: Tensor | None = None
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None
        self._given_communicator = communicator
        self._open: tuple[Any, Any] | None = None  # communicator and handle, until combine
        self._warned = False

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Take a micro-batch's routing: sets token_indices and token_probs. No communication.

        routing_map: [T, E] or [T, R, E / R], not zero where the token goes to the expert; it alone
        decides, so a chosen expert with probability zero gets its token, and dropped tokens are
        those that the map leaves out. probs: of the same shape, any floating dtype; gradients flow
        through the chosen ones.
        """
        # Megatron compiles its caller: tensor operations of fixed shapes only, no look at values.
        num_tokens, topk, experts = routing_map.shape[0], self.router_topk, self.num_experts
        chosen = routing_map.reshape(num_tokens, experts).bool()
        keys = experts - torch.arange(experts, device=chosen.device)
        # The largest keys are the chosen experts in order of their ids: no ties, so the order of
        # sums does not depend on the device. One more than K shows rows that have too many.
        best = (chosen * keys).topk(min(topk + 1, experts), dim=1).values
        indices = torch.where(best[:, :topk] > 0, experts - best[:, :topk], -1)
        found = probs.reshape(num_tokens, experts).gather(1, indices.clamp(min=0))
        self.token_probs = torch.where(indices >= 0, found, 0.0)
        # An id that no expert has: dispatch then raises on every rank, not on this one alone.
        self.token_indices = torch.where(best[:, topk:].any(1, keepdim=True), experts, indices)

    def dispatch(
        self,
        hidden_states: Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tensor:
        """Send each token [T, H] to its experts' ranks. Returns their rows [rows, H] on this one.

        Rows are ordered by (expert, source rank, token). Sets dispatched_probs and
        tokens_per_expert. Differentiable in hidden_states and token_probs. The two flags are for
        streams of other libraries; the call is done when it returns.

        Raises ValueError on every rank where the routing map sends a token of any rank to more than
        router_topk experts, and what Communicator.dispatch raises.
        """
        del async_finish, allocate_on_comm_stream
        if self.token_indices is None or self.token_probs is None:
            raise FastkernError("dispatch before setup_metadata")
        communicator: Any = self._given_communicator or communicator_of(self.group)
        rows: Tensor  # one tensor was given
        try:
            rows, self.dispatched_probs, _, handle = communicator.dispatch(
                hidden_states,
                self.token_indices,
                self._wide(self.token_probs),
                num_experts=self.num_experts,
                layout="expert",
                expert_alignment=self.expert_alignment,
                zero_padding=self.expert_alignment > 1,  # experts compute on padding too
            )
        except ValueError as error:
            self._explain(error)
            raise
        # Megatron's graph leads from combine to here through the experts on every rank. Where it
        # cuts the graph, combine's backward runs by itself, so there must be no second way here.
        if handle.anchor is not None:
            handle.anchor = handle.anchor.detach()
        # On the host, where the experts split their rows by it.
        counts = torch.tensor(handle.tokens_per_expert_list, dtype=torch.int64)
        self.tokens_per_expert = counts + -counts % self.expert_alignment
        self._open = communicator, handle
        return rows

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, which are in the experts' order already, and their probabilities [rows]."""
        if self.dispatched_probs is None:
            raise FastkernError("permuted states are asked for before dispatch")
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """Rows of each own expert, padding included: int64 [E / R], on the host."""
        if self.tokens_per_expert is None:
            raise FastkernError("tokens per expert are asked for before dispatch")
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """The experts' output as it is: combine takes it in the experts' order."""
        return hidden_states

    def combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tensor:
        """Sum the experts' output rows [rows, H] back to their tokens, unweighted: [T, H].

        Tokens without any expert get zeros. Lets go of what dispatch left here; a backward pass has
        its own hold on it. The flags are as in dispatch.
        """
        del async_finish, allocate_on_comm_stream
        if self._open is None:
            raise FastkernError("combine without a dispatch before it")
        communicator, handle = self._open
        result: Tensor = communicator.combine(hidden_states, handle, wire_dtype=self.wire_dtype)
        self._open = self.dispatched_probs = self.tokens_per_expert = None
        return result

    def _wide(self, probs: Tensor) -> Tensor:
        if probs.dtype in (torch.float32, torch.float64):
            return probs
        if not self._warned:
            self._warned = True
            log.warning(
                "the router's probabilities are %s; they travel as float32. "
                "moe_router_dtype='fp32' keeps the precision before that",
                probs.dtype,
            )
        return probs.float()

    def _explain(self, error: ValueError) -> None:
        """Say in the user's words what setup_metadata has marked."""
        assert self.token_indices is not None
        marked = (self.token_indices == self.num_experts).any(1).nonzero()
        if len(marked):
            raise ValueError(
                f"routing_map sends token {int(marked[0])} to more than "
                f"router_topk={self.router_topk} experts"
            ) from error


# -- switching it on -------------------------------------------------------------------------------

_replaced: dict[str, tuple[Any, Any]] = {}  # by backend: Megatron's module, and its own manager


def enable(backend: str = "ncclep", *, wire_dtype: torch.dtype | None = None) -> None:
    """Have the flex dispatchers that Megatron-LM makes from now on exchange tokens with fastkern.

    Call it before the model is built, on every rank, and configure Megatron with
    moe_token_dispatcher_type="flex" and moe_flex_dispatcher_backend=`backend`. It puts a
    DispatchManager where Megatron would put that backend's manager; the backend's library is then
    not needed. "ncclep" is right wherever Megatron has it: its contract is the expert layout's.
    "deepep" is for versions without it; micro-batch overlap then cannot be used.
    wire_dtype: as for DispatchManager.

    Raises ImportError without Megatron-LM; ValueError for another backend; FastkernError, naming
    what differs, where this Megatron-LM is not as expected: its module has no such names, its
    dispatcher does not make the manager by name, the manager is made or called with other
    arguments, or has abstract methods that fastkern does not know.
    """
    if backend not in _PLACES:
        raise ValueError(f"backend must be one of {sorted(_PLACES)}, not {backend!r}")
    try:
        module: Any = importlib.import_module(_DISPATCHER)
        utils: Any = importlib.import_module(_MOE_UTILS)
    except ImportError as error:
        raise ImportError(f"Megatron-LM cannot be imported: {error}") from error
    disable(backend)
    _check_interface(module, utils, backend)
    name = _PLACES[backend]

    def make(
        self: Any,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any,
    ) -> None:
        _check_config(config, backend)
        DispatchManager.__init__(
            self,
            group,
            num_local_experts,
            router_topk,
            num_experts,
            expert_alignment=_expert_alignment(config, backend, utils),
            wire_dtype=wire_dtype,
        )

    manager = type(
        "FastkernManager", (DispatchManager, module._DispatchManager), {"__init__": make}
    )
    _replaced[backend] = module, getattr(module, name)
    setattr(module, name, manager)
    log.info("Megatron-LM's flex dispatchers with backend %s now use fastkern", backend)


def disable(backend: str | None = None) -> None:
    """Give Megatron-LM its own manager back, for dispatchers made from now on; by default all."""
    for each in [backend] if backend is not None else list(_replaced):
        if each in _replaced:
            module, own = _replaced.pop(each)
            setattr(module, _PLACES[each], own)


def _check_interface(module: Any, utils: Any, backend: str) -> None:
    name = _PLACES[backend]
    missing = [
        f"{where.__name__}.{each}"
        for where, each in [
            (module, "MoEFlexTokenDispatcher"),
            (module, "_DispatchManager"),
            (module, name),
            (utils, "get_align_size_for_quantization"),
        ]
        if not hasattr(where, each)
    ]
    if missing:
        raise FastkernError(f"this Megatron-LM has no {', '.join(missing)}")
    own = getattr(module, name)
    made_by = inspect.unwrap(module.MoEFlexTokenDispatcher.__init__)
    if name not in made_by.__code__.co_names:
        raise FastkernError(f"this Megatron-LM's MoEFlexTokenDispatcher does not make a {name}")
    arguments = list(inspect.signature(own.__init__).parameters)[1:]
    if arguments != _ARGUMENTS:
        raise FastkernError(f"this Megatron-LM makes its {name} with {arguments}")
    for method in ("setup_metadata", "dispatch", "combine"):
        theirs = list(inspect.signature(getattr(own, method)).parameters)
        ours = list(inspect.signature(getattr(DispatchManager, method)).parameters)
        if theirs != ours:
            raise FastkernError(f"this Megatron-LM's {name}.{method} takes {theirs}")
    unknown = [
        n for n in module._DispatchManager.__abstractmethods__ if n not in vars(DispatchManager)
    ]
    if unknown:
        raise FastkernError(f"this Megatron-LM's managers have more methods: {sorted(unknown)}")


def _check_config(config: Any, backend: str) -> None:
    """Refuse what this manager would have to do otherwise than the one whose place it takes."""

    def on(option: str) -> bool:
        return bool(getattr(config, option, None))

    refused = {
        "moe_pad_expert_input_to_capacity": "tokens are not padded to a capacity",
        "moe_expert_rank_capacity_factor": "no token is dropped here, so no budget is set",
        "moe_ncclep_static_shape": "received tensors have as many rows as there are",
        "moe_ncclep_zero_copy": "NCCL's buffers are not used",
    }
    if backend == "deepep":
        refused["overlap_moe_expert_parallel_comm"] = (
            "Megatron then frees what dispatch returned, of which deepep's permutation is a copy; "
            "use enable('ncclep')"
        )
    for option, why in refused.items():
        if on(option):
            raise ValueError(f"{option} cannot be used with fastkern: {why}")
    for option in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
        if getattr(config, option, "bf16") != "bf16":
            raise ValueError(f"{option} cannot be used with fastkern: rows travel in their dtype")


def _expert_alignment(config: Any, backend: str, utils: Any) -> int:
    """What the experts expect to have been padded before them; 1 where they pad by themselves."""
    skips = getattr(utils, "skip_routed_expert_padding", None)
    padded = (
        backend == "ncclep"
        or bool(getattr(config, "moe_router_padding_for_quantization", False))
        or (skips is not None and bool(skips(config)))
    )
    return max(1, int(utils.get_align_size_for_quantization(config))) if padded else 1
