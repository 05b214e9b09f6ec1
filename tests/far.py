"""A device that is not the CPU, as strict as a GPU and stricter than torch: memory that the host cannot touch.

Tensors on `FAR` are of torch's own device type for others ("privateuseone"); their data lies in host memory that only
`FarTensor` knows. Nothing is computed together with a host tensor, `.numpy()`, `.item()`, `.tolist()`, `bool()` and
tensors of the wrong device raise, and whatever would make the host wait for a GPU's queue is counted in `WAITS`:

* read: a copy to the host
* shape: an operation whose result's size only the device knows (nonzero, a mask as an index, unique ...)

A copy to the device raises unless it is `non_blocking`: torch makes the host wait for any other.

By a number of the host it divides as CUDA does: it multiplies by the reciprocal, which may be rounded otherwise.

It has streams (`FarStream`), a current one per thread. Operations are computed at once, whatever their stream; but each
stretch of memory knows who wrote and read it last, and whoever uses it in another stream, without an event that says
that they are done, is a `Race`.
"""

import functools
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyDeviceGuard

from clusters import Cluster
from spardl.collectives.program import AllReduce, Message, Round
from spardl.kernels.torch import TorchKernels
from spardl.sync.synchronizer import Synchronizer

FAR = torch.device("privateuseone", 0)
WAITS: Counter[str] = Counter()
UPLOADS: Counter[str] = Counter()  # numbers that were copied to the device

_aten = torch.ops.aten
_SCALARS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_SHAPES = {
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
    _aten.bincount.default,
    _aten.repeat_interleave.Tensor,
    _aten.isin.Tensor_Tensor,  # by sorting and `unique`, where there are many
}
_MASKED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}

_DIVISIONS = {_aten.div.Tensor: _aten.mul.Tensor, _aten.div_.Tensor: _aten.mul_.Tensor}  # by numbers of the host


class HostTouch(AssertionError):
    """Something looked at far memory, or mixed it with host memory, without saying so."""


class Race(AssertionError):
    """Something used memory in one stream that another one may still be working on."""


class FarStream:
    """A queue of the device. `seen` says how much of each stream is done before what is queued here next begins."""

    def __init__(self, device: torch.device = FAR) -> None:
        assert device.type == FAR.type
        self.seen: Counter[FarStream] = Counter()

    def record_event(self) -> "Counter[FarStream]":
        return self.seen.copy()

    def wait_event(self, event: "Counter[FarStream]") -> None:
        self.seen |= event

    def synchronize(self) -> None:
        WAITS["stream"] += 1

    def use(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Queue something that reads and writes these tensors of the device."""
        self.seen[self] += 1
        for tensors, writing in ((reads, False), (writes, True)):
            for each in tensors:
                if not each.numel():
                    continue
                found = _uses.setdefault(_address(each), _Uses())
                last = found.read | found.written if writing else found.written
                if not last <= self.seen:
                    raise Race(f"memory of {tuple(each.shape)} is {'written' if writing else 'read'} too early")
                if writing:
                    found.written[self] = self.seen[self]
                else:
                    found.read[self] = self.seen[self]


class _Uses:
    """Of a stretch of memory, the last one by each stream."""

    def __init__(self) -> None:
        self.read: Counter[FarStream] = Counter()
        self.written: Counter[FarStream] = Counter()


_uses: dict[int, _Uses] = {}


def _address(tensor: Tensor) -> int:
    return tensor.raw.untyped_storage().data_ptr()  # type: ignore[attr-defined]


def current_stream(device: torch.device = FAR) -> FarStream:
    """That of this thread: a thread of a test is a rank with a device of its own."""
    if not hasattr(_here, "stream"):
        _here.stream = FarStream()
    return _here.stream


@contextmanager
def _inside(stream: FarStream) -> Iterator[None]:
    before, _here.stream = current_stream(), stream
    try:
        yield
    finally:
        _here.stream = before


class FarTensor(Tensor):
    """A tensor on `FAR`; its memory is that of `raw`, views of it are views of that."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "FarTensor":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=FAR
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def data_ptr(self) -> int:  # where it lies, which a host may know
        return self.raw.data_ptr()

    def __repr__(self, **_: Any) -> str:  # torch's own would read it
        return f"FarTensor({tuple(self.shape)}, {self.dtype})"


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    if func is _aten._to_copy.default and kwargs.get("device", FAR).type == "cpu":
        WAITS["read"] += 1
        current_stream().use(args[:1], ())
        return func(args[0].raw, **kwargs)
    if func is _aten.copy_.default:
        return _copy(*args)
    if func in _DIVISIONS and not isinstance(args[1], FarTensor) and not getattr(_here, "steps", False):
        func, args = _DIVISIONS[func], (args[0], _reciprocal(args[1], args[0].dtype))
    _judge(func, args, kwargs)
    _queue(func, args, kwargs)
    raw = func(*_near(args), **{name: _near(value) for name, value in kwargs.items()})
    given = [each for each in _tensors(args, kwargs) if isinstance(each, FarTensor)]
    made = _wrapped(raw, {id(each.raw): each for each in given})
    fresh = {_address(each): each for each in _tensors((made,), {}) if isinstance(each, FarTensor) and each.numel()}
    for place in fresh.keys() - {_address(each) for each in given}:
        _uses.pop(place, None)  # of whoever had this memory before
        current_stream().use((), [fresh[place]])
    return made


def _reciprocal(number: Any, kind: torch.dtype) -> Tensor:
    return torch.ones((), dtype=kind if kind.is_floating_point else torch.float32) / number


def _queue(func: Any, args: Any, kwargs: Any) -> None:
    """Put an operation into the current stream; a view touches no memory."""
    written, is_view = _kind(func)
    if is_view:
        return
    names = {**dict(enumerate(args)), **kwargs}
    changed = [each for name in written for each in _tensors((names.get(name),), {})]
    reads, writes = (
        [each for each in some if isinstance(each, FarTensor)] for some in (_tensors(args, kwargs), changed)
    )
    current_stream().use(reads, writes)


@functools.cache
def _kind(func: Any) -> tuple[list[int | str], bool]:
    """Which arguments an operation writes to, and whether its result is just another look at the same memory."""
    schema = func._schema
    written: list[int | str] = []
    for place, each in enumerate(schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            written += [place, each.name]
    shown = any(each.alias_info is not None for each in schema.returns)
    return written, shown and not written


def _wrapped(raw: Any, changed: dict[int, FarTensor]) -> Any:
    if isinstance(raw, Tensor):
        return changed[id(raw)] if id(raw) in changed else FarTensor(raw)
    return type(raw)(_wrapped(each, changed) for each in raw) if isinstance(raw, list | tuple) else raw


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, FarTensor):
        WAITS["read"] += 1
        current_stream().use([source], ())
        return target.copy_(source.raw)  # type: ignore[attr-defined]
    if not isinstance(source, FarTensor) and source.dim() and not (non_blocking or getattr(_here, "loads", False)):
        raise HostTouch("a copy to the device that the host waits for")
    if not isinstance(source, FarTensor):
        UPLOADS["numbers"] += source.numel()
    current_stream().use([each for each in (source,) if isinstance(each, FarTensor)], [target])
    target.raw.copy_(_near(source))
    return target


def _judge(func: Any, args: Any, kwargs: Any) -> None:
    if func in _SCALARS:
        raise HostTouch(f"{func} brings a number to the host")
    if any(not isinstance(each, FarTensor) and each.dim() for each in _tensors(args, kwargs)):
        raise HostTouch(f"{func} was given far and host tensors")
    if kwargs.get("output_size") is not None:
        return
    if func in _SHAPES or (func in _MASKED and any(each is not None and each.dtype is torch.bool for each in args[1])):
        WAITS["shape"] += 1


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What an operation was given. Torch's own way through trees takes longer than most operations here."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from (one for one in each if isinstance(one, Tensor))


def _near(value: Any) -> Any:
    if isinstance(value, FarTensor):
        return value.raw
    if isinstance(value, list | tuple):
        return type(value)(_near(each) for each in value)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == FAR.type else value


def _register() -> None:
    """Tell torch of the device. `torch.accelerator` does not count it: other tests do not see it."""
    module = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0, _is_in_bad_fork=lambda: False
    )
    module.Stream, module.stream, module.current_stream = FarStream, _inside, current_stream
    torch._register_device_module(FAR.type, module)
    torch._C._acc.register_python_privateuseone_device_guard(_guard)
    _library.fallback(lambda func, *args, **kwargs: _compute(func, args, kwargs), "PrivateUse1")


@contextmanager
def loading() -> Iterator[None]:
    """Copies to the device may wait inside, on this thread: torch's optimizers load their states like that."""
    _here.loads = True
    try:
        yield
    finally:
        _here.loads = False


def divides_alike(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer divide as on a CPU while it steps, and what others do before and after that as ever. To be
    called before others hook into its steps."""
    optimizer.register_step_pre_hook(lambda *_: setattr(_here, "steps", True))
    optimizer.register_step_post_hook(lambda *_: setattr(_here, "steps", False))


_here = threading.local()
_guard = _DummyDeviceGuard()
_library = torch.library.Library("_", "IMPL")
_register()


def far(values: Tensor) -> Tensor:
    """A copy on the device, which was there before anything was queued."""
    made = FarTensor(values.detach().clone())
    _uses.pop(_address(made), None)
    return made


def near(values: Tensor) -> Tensor:
    """A copy that the host may read; it is a test that looks, so nothing is counted."""
    return values.raw.clone() if isinstance(values, FarTensor) else values


class FarCluster(Cluster):
    """Workers whose memory, gradients and frames are on `FAR`; what the host sends is brought there, as by NCCL."""

    def __init__(self, workers, elements, config, *, plans=None, momentum=False):
        super().__init__(workers, elements, config, momentum=momentum)
        plans = plans or self.ranks[0].plan
        kernels = TorchKernels(fills=True)
        self.ranks = [
            Synchronizer(rank, workers, kernels=kernels, device=FAR, momentum=momentum) for rank in range(workers)
        ]
        for sync in self.ranks:
            sync.regroup(plans)

    def step(self, gradients, **terms):
        return [near(each) for each in super().step([far(each) for each in gradients], **terms)]

    def step_all(self, gradients, rules=None, **terms):
        driver, self.network = self.network, _Uploading(self.network)
        try:
            return super().step_all(gradients, rules, **terms)
        finally:
            self.network = driver

    def residuals(self):
        return [near(each) for each in super().residuals()]


class _Uploading:
    """Drives programs; every frame is on `FAR` when it arrives."""

    def __init__(self, driver):
        self._driver = driver

    def run(self, programs):
        return self._driver.run([_on_device(program) for program in programs])


def _on_device(program):
    arrived = None
    while True:
        try:
            operation = program.send(arrived)
        except StopIteration as end:
            return end.value
        if isinstance(operation, AllReduce):
            assert operation.tensor.device == FAR
        else:
            send = [Message(peer, _up(frame), room) for peer, frame, room in operation.send]
            operation = Round(send, operation.receive, operation.name, operation.meanwhile)
        arrived = yield operation


def _up(frame):
    return frame if isinstance(frame, FarTensor) else far(torch.as_tensor(frame))
