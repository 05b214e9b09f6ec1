"""Every use of a name that torch keeps private, each in one function, so that a new torch has one file to break.

Each function says in which versions of torch its names were seen, and what it does where they are missing.
"""

import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]


def default_store() -> Store | None:
    """The store through which the ranks of the default process group have found each other.

    `torch.distributed.distributed_c10d._get_default_store`, seen in torch 2.13. None where it is missing.
    """
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def group_store(group: Any) -> Store | None:
    """The store through which the ranks of this process group have found each other, whether torch knows it or not.

    `ProcessGroup.get_group_store`, seen in torch 2.13. None where it is missing, and where a group has none.
    """
    try:
        store: Store = group.get_group_store()
    except (RuntimeError, AttributeError):
        return None
    return store


def store_place(store: Any) -> tuple[str, int] | None:
    """Host and port of the server behind a store.

    `PrefixStore.underlying_store`, `TCPStore.host` and `TCPStore.port`, seen in torch 2.13. None where they are
    missing, and where the store has no server.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


def gloo_devices() -> list[Any]:
    """What the default process group's gloo sends and receives with: each device has a thread of its own.

    `ProcessGroup._get_backend` and `ProcessGroupGloo.options._devices`, seen in torch 2.13. Empty where they are
    missing, and where the default group has no gloo.
    """
    world: Any = dist.group.WORLD
    try:
        return list(world._get_backend(torch.device("cpu")).options._devices)
    except (RuntimeError, AttributeError):
        return []


def gloo_behind(group: Any) -> Any:
    """The gloo of a process group, to be kept until the group is gone, and then let go.

    torch 2.6 ends a group, and with it gloo's threads, while it holds Python's lock; one of these may just be waiting
    for that lock, to free the last tensor, and then both wait for ever. What is returned here ends without the lock.

    `ProcessGroup._get_backend`, seen in torch 2.6 and 2.13. None where it is missing, and where a group has no gloo.
    """
    try:
        return group._get_backend(torch.device("cpu"))
    except (RuntimeError, AttributeError):
        return None


def gloo_group(store: Store, rank: int, size: int, *, devices: list[Any], threads: int, timeout: timedelta) -> Any:
    """A group of gloo's on devices that exist already; `dist.new_group` would make one. Collective.

    `ProcessGroupGloo._Options` with `_devices`, `_threads` and `_timeout`, seen in torch 2.13. None where they are
    missing.
    """
    gloo: Any = dist.ProcessGroupGloo
    if not hasattr(gloo, "_Options"):
        return None
    options = gloo._Options()
    options._devices, options._threads, options._timeout = devices, threads, timeout
    return gloo(store, rank, size, options)


def after_backward(callback: Callable[[], None]) -> bool:
    """Have `callback` called when the backward under way is over, on the thread that called it. Whether it will be.

    `torch.autograd.Variable._execution_engine.queue_callback`, seen in torch 2.13. False where it is missing, and where
    no backward is under way.
    """
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    try:
        engine.queue_callback(callback)
    except (RuntimeError, AttributeError):
        return False
    return True


def has_comm_hook(model: nn.Module) -> bool:
    """Whether a communication hook was registered with this `DistributedDataParallel`.

    `DistributedDataParallel._comm_hooks`, seen in torch 2.13. False where it is missing: DDP then refuses a second hook
    by itself, in its own words.
    """
    return bool(getattr(model, "_comm_hooks", None))


def drop_comm_hook(model: nn.Module) -> bool:
    """Have this `DistributedDataParallel` average by itself again, as if no hook had ever been registered: it gets
    another reducer. Between steps, on all ranks alike. Whether that was done.

    `DistributedDataParallel._ddp_init_helper` and what makes its arguments, as for a model that was unpickled, and
    `Reducer._remove_autograd_hooks`, seen in torch 2.13. False where they are missing, where a reducer knows
    more than its arguments say (which parameters passes without an exchange have used, a graph that never changes), and
    where it had other parameters, which have been frozen since.
    """
    knowing = ("static_graph", "find_unused_parameters", "mixed_precision", "_use_python_reducer")
    if any(getattr(model, name, True) for name in knowing) or getattr(model, "_delay_all_reduce_all_params", True):
        return False
    ddp: Any = model
    try:
        before, known = ddp.reducer, ddp._get_ddp_logging_data()["num_parameter_tensors"]
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        if len(parameters) != known:
            return False
        ddp._ddp_init_helper(parameters, sparse, names, False)
        before._remove_autograd_hooks()
    except (AttributeError, KeyError, TypeError):
        return False
    ddp._comm_hooks.clear()
    return True


def uncompiled(model: object) -> object:
    """The model that `torch.compile` has wrapped; itself, if it was not compiled.

    `OptimizedModule._orig_mod`, seen in torch 2.13. The model as it is where that is missing.
    """
    return getattr(model, "_orig_mod", model)


def is_rehearsal() -> bool:
    """Whether the optimizer's step under way is one that `torch.distributed.checkpoint` makes, with zeros for gradients
    and for rates, so that an optimizer has moments to save or to load: it is no step of training.

    `torch.distributed.checkpoint.state_dict._init_optim_state`, seen in torch 2.13. False where it is missing.
    """
    rehearse = getattr(sys.modules.get("torch.distributed.checkpoint.state_dict"), "_init_optim_state", None)
    code = getattr(rehearse, "__code__", None)
    frame = None if code is None else inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def batch_norms(model: nn.Module) -> list[Any]:
    """The modules of a model that keep running statistics of their batches.

    `torch.nn.modules.batchnorm._BatchNorm`, the root of all of them, seen in torch 2.13. Where it is missing, those
    that torch itself has.
    """
    public = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    kinds = getattr(nn.modules.batchnorm, "_BatchNorm", public)
    return [module for module in model.modules() if isinstance(module, kinds)]
