"""In which order a queued call, its caller and whoever waits for it use a GPU's streams.

PyTorch's streams and events are replaced by ones that write down what they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkern.device import streams
from fastkern.device.host_driver import HostDriver
from fastkern.device.streams import HostStreams, TorchStreams

GPU = torch.device("cuda", 0)


class Cuda:
    """What streams.py uses of torch.cuda. said: what streams and events were asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.capturing = False
        self.done: set[Any] = set()
        self.now: Any = self.stream_named("caller")
        cuda = self

        class Event:
            name = ""

            def record(self, stream: Any) -> None:
                self.name = f"event of {stream.name}"
                cuda.said.append(f"record on {stream.name}")

            def query(self) -> bool:
                return self in cuda.done

            def synchronize(self) -> None:
                cuda.said.append(f"host waits for {self.name}")

        self.Event = Event

    def stream_named(self, name: str) -> Any:
        cuda = self

        @dataclass
        class Stream:
            name: str
            cuda_stream: int = 5

            def record_event(self) -> Any:
                event = cuda.Event()
                event.record(self)
                return event

            def wait_event(self, event: Any) -> None:
                cuda.said.append(f"{self.name} waits for {event.name}")

        return Stream(name)

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 (torch's name)
        return self.stream_named("lane")

    def current_stream(self, device: torch.device) -> Any:
        assert device == GPU
        return self.now

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == GPU
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class Result(torch.Tensor):
    """A tensor that says it is on the GPU, and by which streams it is used."""

    users: list[str]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    def record_stream(self, stream: Any) -> None:
        self.users.append(stream.name)


def result() -> Result:
    made = torch.zeros(1).as_subclass(Result)
    made.users = []
    return made


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    parts = {name: getattr(torch, name) for name in ("Tensor", "empty", "uint8", "device")}
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=made, **parts))
    return made


def test_a_call_beside_its_caller(cuda: Cuda) -> None:
    order = TorchStreams(GPU)
    fork, made = order.fork(own_lane=True), result()

    def body() -> list[Any]:
        cuda.said.append(f"call in {cuda.now.name}")
        return [made, None, torch.zeros(1)]

    got = fork.run(body)
    assert cuda.said == [
        "record on caller",
        "lane waits for event of caller",
        "call in lane",
        "record on lane",
    ]
    assert cuda.now.name == "caller"
    assert [kept[1] for kept in order._kept] == [body], "its tensors may be freed while in use"
    del cuda.said[:]
    fork.join(got)
    assert cuda.said == ["caller waits for event of lane"]
    assert made.users == ["caller"]
    assert order._kept == []


def test_waiting_in_another_stream_keeps_the_tensors(cuda: Cuda) -> None:
    order = TorchStreams(GPU)
    fork = order.fork(own_lane=True)
    got = fork.run(lambda: SimpleNamespace())
    cuda.now = cuda.stream_named("third")
    fork.join(got)
    assert cuda.said[-1] == "third waits for event of lane"
    (kept,) = order._kept
    cuda.done.add(kept[0])
    other = order.fork(own_lane=True)
    other.run(lambda: None)
    assert len(order._kept) == 1
    assert order._kept[0] is not kept


def test_a_call_that_fails_is_kept_too(cuda: Cuda) -> None:
    order = TorchStreams(GPU)

    def fails() -> None:
        raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        order.fork(own_lane=True).run(fails)
    assert len(order._kept) == 1
    order.close()
    assert order._kept == []


def test_a_call_whose_caller_waits_stays_in_its_stream(cuda: Cuda) -> None:
    order = TorchStreams(GPU)
    caller = cuda.now
    fork = order.fork(own_lane=False)
    cuda.now = cuda.stream_named("default of the queue's thread")
    assert fork.run(lambda: cuda.now) is caller
    fork.join(None)
    assert cuda.said == []


def test_no_call_is_captured(cuda: Cuda) -> None:
    order = TorchStreams(GPU)
    order.check_eager()
    assert order.current() == 5
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="cannot be captured"):
        order.check_eager()


def test_cpu_tensors_wait(clean_driver: HostDriver) -> None:
    order = HostStreams(clean_driver)
    order.check_eager()
    source = torch.arange(4, dtype=torch.uint8)
    copy = order.upload(source.numpy())
    clean_driver.fill(copy.data_ptr(), 9, 2, order.current())
    assert order.settle()
    assert copy.tolist() == [9, 9, 2, 3]
    assert source.tolist() == [0, 1, 2, 3]
    order.waits = False
    clean_driver.fill(copy.data_ptr(), 7, 1, order.current())
    assert not order.settle()
    assert order.download(copy).tolist() == [7, 9, 2, 3]
    order.close()
