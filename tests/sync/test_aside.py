"""The stream beside the caller's, on a device whose streams write down who waits for whom."""

from typing import Any

import pytest
import torch

from spardl.sync import aside
from spardl.sync.aside import Aside
from spardl.sync.lanes import Lanes

DEVICE = torch.device("cuda", 0)  # none is there: everything that would touch it is a recorder


class Streams:
    """In the place of torch's streams: `log` is what was recorded, waited for and queued, in order."""

    def __init__(self, kind: type["OldStream"]) -> None:
        self.log: list[str] = []
        self.kind = kind
        self.current = kind(self, "caller")

    def make(self, device: torch.device) -> "OldStream":
        assert device == DEVICE
        return self.kind(self, "beside")

    def choose(self, stream: "OldStream") -> None:
        self.current = stream

    def queue(self, what: str) -> None:
        self.log.append(f"{what} in {self.current.name}")


class OldStream:
    """As in torch 2.6, whose streams cannot be entered."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record_event(self) -> str:
        self.streams.log.append(f"{self.name} records")
        return self.name

    def wait_event(self, event: str) -> None:
        self.streams.log.append(f"{self.name} waits for {event}")


class Stream(OldStream):
    def __enter__(self) -> None:
        self.before, self.streams.current = self.streams.current, self

    def __exit__(self, *_: Any) -> None:
        self.streams.current = self.before


@pytest.fixture(params=[Stream, OldStream], ids=["streams", "torch 2.6"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams(request.param)
    monkeypatch.setattr(aside, "has_streams", lambda device: True)
    monkeypatch.setattr(torch, "Stream", made.make)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.accelerator, "set_stream", made.choose)
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
    assert not aside.has_streams(torch.device("cpu"))


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
