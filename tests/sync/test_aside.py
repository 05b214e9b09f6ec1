"""The stream beside the caller's, on a device whose streams write down who waits for whom."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.host import bring, streams_of, upload
from spardl.sync.aside import Aside
from spardl.sync.lanes import Lanes

DEVICE = torch.device("cuda", 0)  # none is there: everything that would touch it is a recorder


class Streams:
    """In the place of torch.cuda: `log` is what was recorded, waited for and queued, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.current = Stream(self, "caller")

    def is_available(self) -> bool:
        return True

    def current_stream(self, device: torch.device) -> "Stream":
        assert device == DEVICE
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def Stream(self, device: torch.device) -> "Stream":
        assert device == DEVICE
        self.made += 1
        return Stream(self, f"beside {self.made}" if self.made > 1 else "beside")

    def queue(self, what: str) -> None:
        self.log.append(f"{what} in {self.current.name}")


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record_event(self) -> str:
        self.streams.log.append(f"{self.name} records")
        return self.name

    def wait_event(self, event: str) -> None:
        self.streams.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.streams.log.append(f"the host waits for {self.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def test_what_is_queued_beside_comes_after_what_the_caller_has_queued(streams: Streams) -> None:
    beside = Aside(DEVICE)
    streams.queue("backward")
    with beside.within():
        streams.queue("selection")
    streams.queue("more of backward")
    assert streams.log == [
        "backward in caller",
        "caller records",
        "beside waits for caller",
        "selection in beside",
        "more of backward in caller",
    ]


def test_the_caller_goes_on_when_the_step_is_over(streams: Streams) -> None:
    """Also if that is said while work is still being queued beside."""
    beside = Aside(DEVICE)
    with beside.within():
        streams.queue("commit")
        beside.join()
    streams.queue("optimizer")
    assert streams.log[2:] == ["commit in beside", "beside records", "caller waits for beside", "optimizer in caller"]


def test_a_cpu_has_no_stream_beside() -> None:
    beside = Aside(torch.device("cpu"))
    with beside.within():
        pass
    beside.join()
    assert streams_of(torch.device("cpu")) is None


def test_torch_has_what_is_asked_of_its_module_for_a_kind_of_device() -> None:
    """In the oldest version of torch that is accepted as well; so says its documentation."""
    module = torch.get_device_module(DEVICE)
    assert module is torch.cuda
    assert all(hasattr(module, name) for name in ("Stream", "stream", "current_stream", "synchronize", "is_available"))
    assert streams_of(DEVICE) is (module if module.is_available() else None)


class Away:
    """In the place of a tensor that lies on the device."""

    device, shape, dtype = DEVICE, (3,), torch.float32


def test_what_is_copied_to_cuda_comes_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(Tensor, "to", lambda self, device, non_blocking: (self is pinned[-1], device, non_blocking))
    assert upload([1, 2], DEVICE) == (True, DEVICE, True)


def test_what_is_copied_from_cuda_goes_to_pinned_memory_and_is_waited_for(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By copies that go on by themselves, and one wait for all of them, behind the last."""
    room = torch.empty

    def pinned(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        return room(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(Tensor, "copy_", lambda self, source, non_blocking: streams.queue(f"copy {non_blocking}"))
    bring([Away(), Away()], torch.device("cpu"))  # type: ignore[list-item]
    assert streams.log == ["copy True in caller", "copy True in caller", "the host waits for caller"]


def test_what_is_deferred_without_a_thread_is_done_when_it_is_asked_for() -> None:
    lanes, done = Lanes(threads=False, ahead=False), list[str]()
    first = lanes.defer(lambda: done.append("first"))
    assert not done
    first.result()
    second = lanes.defer(lambda: done.append("second"))
    lanes.run(lambda: done.append("third"))
    assert done == ["first", "second", "third"] and second.done()
    lanes.defer(lambda: done.append("fourth"))
    lanes.wait()
    lanes.defer(lambda: done.append("fifth"))
    lanes.stop()
    assert done[3:] == ["fourth", "fifth"]


def test_what_fails_when_it_is_asked_for_fails_whoever_asks() -> None:
    lanes = Lanes(threads=False, ahead=False)
    asked = lanes.defer(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            asked.result()
