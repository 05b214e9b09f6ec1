"""A device that is not the CPU, as strict as a GPU and stricter than torch: memory that the host cannot touch.

Tensors on `FAR` are of torch's own device type for others ("privateuseone"); their data lies in host memory that only
`FarTensor` knows. Nothing is computed together with a host tensor, `.numpy()`, `.item()`, `.tolist()`, `bool()` and
tensors of the wrong device raise, and whatever would make the host wait for a GPU's queue is counted in `WAITS`:

* read: a copy to the host
* shape: an operation whose result's size only the device knows (nonzero, a mask as an index, unique ...)

A copy to the device raises unless it is `non_blocking`: torch makes the host wait for any other.
"""

import threading
import types
from collections import Counter
from collections.abc import Iterator
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


class HostTouch(AssertionError):
    """Something looked at far memory, or mixed it with host memory, without saying so."""


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
        return func(args[0].raw, **kwargs)
    if func is _aten.copy_.default:
        return _copy(*args)
    _judge(func, args, kwargs)
    raw = func(*_near(args), **{name: _near(value) for name, value in kwargs.items()})
    changed = {id(each.raw): each for each in _tensors(args, kwargs) if isinstance(each, FarTensor)}
    return _wrapped(raw, changed)


def _wrapped(raw: Any, changed: dict[int, FarTensor]) -> Any:
    if isinstance(raw, Tensor):
        return changed[id(raw)] if id(raw) in changed else FarTensor(raw)
    return type(raw)(_wrapped(each, changed) for each in raw) if isinstance(raw, list | tuple) else raw


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, FarTensor):
        WAITS["read"] += 1
        return target.copy_(source.raw)  # type: ignore[attr-defined]
    if not isinstance(source, FarTensor) and source.dim() and not (non_blocking or getattr(_here, "loads", False)):
        raise HostTouch("a copy to the device that the host waits for")
    if not isinstance(source, FarTensor):
        UPLOADS["numbers"] += source.numel()
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
        is_available=lambda: False, device_count=lambda: 1, current_device=lambda: 0, _is_in_bad_fork=lambda: False
    )
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


_here = threading.local()
_guard = _DummyDeviceGuard()
_library = torch.library.Library("_", "IMPL")
_register()


def far(values: Tensor) -> Tensor:
    """A copy on the device."""
    return FarTensor(values.detach().clone())


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
