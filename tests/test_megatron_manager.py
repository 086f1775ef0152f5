"""The dispatch manager for Megatron-LM by itself, and what `enable` puts in Megatron's place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkern import FastkernError
from fastkern.integrations import megatron
from tests import megatron_double as double

HIDDEN = 24

# -- the manager alone -----------------------------------------------------------------------------


class Recorder:
    """A communicator that notes what it is called with; four own experts get two rows each."""

    def __init__(self) -> None:
        self.dispatched: list[tuple[Any, ...]] = []
        self.combined: list[tuple[Any, ...]] = []

    def dispatch(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        self.dispatched.append((*args, options))
        handle = SimpleNamespace(tokens_per_expert_list=[2, 0, 5, 1], anchor=None)
        return args[0], args[2][:, 0], None, handle

    def combine(self, *args: Any, **options: Any) -> Tensor:
        self.combined.append((*args, options))
        result: Tensor = args[0]
        return result


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Makes managers believe that they are one of two ranks."""
    recorder = Recorder()
    monkeypatch.setattr(megatron.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(megatron, "communicator_of", lambda group: {"the group": recorder}[group])
    return recorder


def make_manager(topk: int = 3, **options: Any) -> megatron.DispatchManager:
    return megatron.DispatchManager("the group", 4, topk, 8, **options)


CHOSEN = torch.tensor(
    [
        [0, 1, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 1, 0, 0],
    ]
)
INDICES = torch.tensor([[1, 6, 7], [-1, -1, -1], [0, -1, -1], [3, 5, -1]])


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("shape", [(4, 8), (4, 2, 4)])
def test_multihot_to_topk(alone: Recorder, kind: torch.dtype, shape: tuple[int, ...]) -> None:
    """Experts in order of their ids, whatever their probabilities; the map alone decides."""
    manager = make_manager()
    probs = torch.rand(4, 8, dtype=torch.float64)
    probs[0, 6] = 0  # chosen, with probability zero
    probs[0, 0] = float("nan")  # not chosen
    probs.requires_grad_()
    manager.setup_metadata(CHOSEN.to(kind).view(shape), probs.view(shape))
    assert manager.token_indices is not None
    assert manager.token_probs is not None
    assert torch.equal(manager.token_indices, INDICES)
    for got, indices, row in zip(manager.token_probs, INDICES.tolist(), probs, strict=True):
        assert got.tolist() == [row[e].item() if e >= 0 else 0 for e in indices]
    manager.token_probs.sum().backward()
    assert torch.equal(probs.grad, CHOSEN.double())


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_setup_is_one_graph(alone: Recorder, num_tokens: int) -> None:
    """Megatron compiles the method that calls it: nothing in it may break the graph."""
    manager = make_manager()
    compiled = torch.compile(manager.setup_metadata, fullgraph=True, backend="eager")
    compiled(CHOSEN[:num_tokens].bool(), torch.rand(num_tokens, 8))
    assert manager.token_indices is not None
    assert torch.equal(manager.token_indices, INDICES[:num_tokens])


def test_what_the_communicator_is_asked(alone: Recorder) -> None:
    manager = make_manager(expert_alignment=4, wire_dtype=torch.float32)
    x = torch.rand(4, HIDDEN, dtype=torch.bfloat16)
    manager.setup_metadata(CHOSEN.bool(), torch.rand(4, 8))
    rows = manager.dispatch(x, True, True)
    (asked,) = alone.dispatched
    assert asked[:3] == (x, manager.token_indices, manager.token_probs)
    assert asked[3] == {
        "num_experts": 8,
        "layout": "expert",
        "expert_alignment": 4,
        "zero_padding": True,
    }
    assert manager.get_number_of_tokens_per_expert().tolist() == [4, 0, 8, 4]
    manager.combine(rows, True, True)
    (combined,) = alone.combined
    assert combined[0] is rows
    assert combined[2] == {"wire_dtype": torch.float32}  # and no weights
    assert manager.dispatched_probs is None


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_probabilities_are_wide(
    alone: Recorder, caplog: pytest.LogCaptureFixture, given: torch.dtype, sent: torch.dtype
) -> None:
    manager = make_manager()
    probs = torch.rand(4, 8, dtype=given, requires_grad=True)
    for _ in range(2):
        manager.setup_metadata(CHOSEN.bool(), probs)
        manager.dispatch(torch.rand(4, HIDDEN))
        assert alone.dispatched[-1][2].dtype == sent
        alone.dispatched[-1][2].sum().backward()
    assert probs.grad is not None
    assert probs.grad.dtype == given
    assert len(caplog.records) == (given != sent)


def test_calls_out_of_order(alone: Recorder) -> None:
    manager = make_manager()
    x = torch.rand(4, HIDDEN)
    with pytest.raises(FastkernError, match="before setup_metadata"):
        manager.dispatch(x)
    manager.setup_metadata(CHOSEN.bool(), torch.rand(4, 8))
    for early in (
        lambda: manager.combine(x),
        lambda: manager.get_permuted_hidden_states_by_experts(x),
        manager.get_number_of_tokens_per_expert,
    ):
        with pytest.raises(FastkernError, match="dispatch"):
            early()
    manager.dispatch(x)
    manager.combine(x)
    with pytest.raises(FastkernError, match="without a dispatch"):
        manager.combine(x)


def test_experts_must_fit_ranks(alone: Recorder) -> None:
    with pytest.raises(ValueError, match="9 experts are not 4 on each of 2 ranks"):
        megatron.DispatchManager("the group", 4, 2, 9)
    with pytest.raises(ValueError, match="router_topk is 0"):
        make_manager(topk=0)
    with pytest.raises(ValueError, match="router_topk is 9"):
        make_manager(topk=9)


# -- switching it on -------------------------------------------------------------------------------


@pytest.fixture
def theirs(alone: Recorder) -> Iterator[Any]:
    """The double's module in Megatron-LM's place."""
    with double.installed() as module:
        yield module
        megatron.disable()


def built(backend: str, **options: Any) -> Any:
    """The manager of a dispatcher that Megatron-LM builds now."""
    config = double.Config(8, 2, backend, **options)
    groups = double.Groups("the group", 1, 2)
    return double.MoEFlexTokenDispatcher(4, range(4), config, groups)._comm_manager


def test_without_megatron() -> None:
    """Neither package needs Megatron-LM, until it is switched on."""
    program = """
import sys
sys.modules["megatron"] = None  # not to be found
import fastkern
assert "fastkern.integrations" not in sys.modules
import fastkern.integrations.megatron as ours
try:
    ours.enable()
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("Megatron-LM cannot be imported"), done.stdout


@pytest.mark.parametrize("backend", ["ncclep", "deepep"])
def test_enable_and_disable(theirs: Any, backend: str) -> None:
    before = vars(theirs).copy()
    megatron.enable(backend)
    megatron.enable(backend, wire_dtype=torch.float32)  # again, with another option
    manager = built(backend)
    assert isinstance(manager, megatron.DispatchManager)
    assert isinstance(manager, theirs._DispatchManager)
    assert (manager.group, manager.router_topk, manager.num_experts) == ("the group", 2, 8)
    assert manager.wire_dtype == torch.float32
    with pytest.raises(ImportError):
        built({"ncclep": "deepep", "deepep": "ncclep"}[backend])  # which is still Megatron's own
    megatron.disable()
    assert vars(theirs) == before
    with pytest.raises(ImportError):
        built(backend)


@pytest.mark.parametrize(
    ("backend", "options", "alignment"),
    [
        ("ncclep", {}, 1),
        ("ncclep", {"quantized_alignment": 16}, 16),
        ("deepep", {"quantized_alignment": 16}, 1),  # those experts pad by themselves
        ("deepep", {"quantized_alignment": 16, "moe_router_padding_for_quantization": True}, 16),
    ],
)
def test_alignment(theirs: Any, backend: str, options: dict[str, Any], alignment: int) -> None:
    megatron.enable(backend)
    assert built(backend, **options).expert_alignment == alignment


@pytest.mark.parametrize(
    ("backend", "option", "value"),
    [
        ("ncclep", "moe_pad_expert_input_to_capacity", True),
        ("ncclep", "moe_expert_rank_capacity_factor", 1.5),
        ("ncclep", "moe_ncclep_zero_copy", True),
        ("ncclep", "moe_dispatch_fwd_dtype", "mxfp8"),
        ("ncclep", "moe_combine_bwd_dtype", "mxfp8"),
        ("deepep", "overlap_moe_expert_parallel_comm", True),
    ],
)
def test_refused_options(theirs: Any, backend: str, option: str, value: Any) -> None:
    megatron.enable(backend)
    built(backend)
    with pytest.raises(ValueError, match=f"^{option} cannot be used"):
        built(backend, **{option: value})


def test_overlap_with_ncclep(theirs: Any) -> None:
    megatron.enable()
    built("ncclep", overlap_moe_expert_parallel_comm=True)


def _changed_arguments(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._NCCLEPManager, "__init__", lambda self, group, config: None)


def _changed_method(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._NCCLEPManager, "dispatch", lambda self, hidden_states, probs: None)


def _new_method(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    more = module._DispatchManager.__abstractmethods__ | {"prefetch"}
    monkeypatch.setattr(module._DispatchManager, "__abstractmethods__", more)


def _made_otherwise(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.MoEFlexTokenDispatcher, "__init__", lambda self: None)


def _without(name: str) -> Any:
    return lambda module, monkeypatch: monkeypatch.delattr(module, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("MoEFlexTokenDispatcher"), "has no .*MoEFlexTokenDispatcher$"),
        (_without("_DispatchManager"), "has no .*_DispatchManager$"),
        (_without("_NCCLEPManager"), "has no .*_NCCLEPManager$"),
        (_without("get_align_size_for_quantization"), "has no .*get_align_size_for_quantization$"),
        (_changed_arguments, r"makes its _NCCLEPManager with \['group', 'config'\]"),
        (_changed_method, "dispatch takes"),
        (_new_method, r"more methods: \['prefetch'\]"),
        (_made_otherwise, "does not make a _NCCLEPManager"),
    ],
)
def test_another_megatron_is_refused(
    theirs: Any, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    change(theirs, monkeypatch)
    left = vars(theirs).copy()
    with pytest.raises(FastkernError, match=message):
        megatron.enable()
    assert vars(theirs) == left


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="not 'hybridep'"):
        megatron.enable("hybridep")
