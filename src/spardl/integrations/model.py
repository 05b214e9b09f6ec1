"""What of a model is synchronised, and under which names."""

import warnings
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn import Embedding, EmbeddingBag, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spardl import _torch_private
from spardl.errors import ConfigError, SparDLWarning
from spardl.integrations.parts import kind_of, part_of
from spardl.sync.plan import Member

COMPILED = "_orig_mod."  # what torch.compile puts before names


def unwrap(model: object, *, hooked: bool = False) -> DistributedDataParallel:
    """The DDP model itself, also of one that was compiled after wrapping. `hooked`: the hook that it has is ours.

    Raises:
        ConfigError: this is no DDP model, or it has a communication hook already.
    """
    inner = _torch_private.uncompiled(model)
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"attach needs a DistributedDataParallel model, not {type(model).__name__}; wrap it first, or give"
            ' when="step" or update="local".'
        )
    if not hooked and _torch_private.has_comm_hook(inner):
        raise ConfigError("this model has a communication hook already, and DDP takes only one; wrap the module anew.")
    return inner


def dense_parameters(model: DistributedDataParallel) -> dict[str, Parameter]:
    """The parameters that may have dense gradients, by name, in registration order; also those frozen now.

    Names are those of the plain module, whether it was compiled or not, so that states load either way.
    """
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    sparse = {id(m.weight) for m in model.module.modules() if isinstance(m, Embedding | EmbeddingBag) and m.sparse}
    found = {
        name.replace(COMPILED, ""): parameter
        for name, parameter in model.module.named_parameters()
        if name not in ignored and id(parameter) not in sparse
    }
    if not any(parameter.requires_grad for parameter in found.values()):
        raise ConfigError(
            "this model has no parameter with a dense gradient, so there is nothing to synchronise sparsely."
        )
    if any(parameter.is_complex() for parameter in found.values()):
        raise ConfigError("complex parameters cannot be synchronised sparsely; let DDP ignore them, or make them real.")
    return found


def members_of(parameters: dict[str, Parameter]) -> list[Member]:
    """Those that are trained now, from the last registered one on, which backward reaches first."""
    trained = [item for item in reversed(parameters.items()) if item[1].requires_grad]
    return [Member(name, parameter.numel()) for name, parameter in trained]


def parts_as_members(parameters: Mapping[str, Parameter]) -> list[Member]:
    """What of these parameters lies on this rank, in their order; sharded ones may have nothing here."""
    sizes = {name: part_of(parameter).numel() for name, parameter in parameters.items()}
    return [Member(name, size, kind_of(parameters[name])) for name, size in sizes.items() if size]


def facts_of(parameters: dict[str, Parameter]) -> list[object]:
    """What ranks compare to know that they have the same model, or the same part of one."""
    return [[name, list(part_of(p).shape), str(p.dtype), p.requires_grad, kind_of(p)] for name, p in parameters.items()]


def plain_module(model: nn.Module) -> nn.Module:
    """The module itself, without what torch.compile and DDP have wrapped round it, in either order."""
    inner = _torch_private.uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        inner = _torch_private.uncompiled(inner.module)
    assert isinstance(inner, nn.Module)
    return inner


def stepped_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Parameter]:
    """The parameters of a model that these optimizers step, by name, in registration order."""
    if not optimizers:
        raise ConfigError("local updates need the optimizer that steps this model; give optimizer=..., or a list.")
    stepped = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    named = {name.replace(COMPILED, ""): each for name, each in plain_module(model).named_parameters() if each.numel()}
    found = {name: parameter for name, parameter in named.items() if id(parameter) in stepped}
    if not found:
        raise ConfigError("these optimizers step no parameter of the model; give those that do.")
    if any(not parameter.is_floating_point() for parameter in found.values()):
        raise ConfigError("complex parameters cannot be synchronised sparsely; step them by an optimizer of their own.")
    others = [name for name, each in named.items() if each.requires_grad and name not in found]
    if others:
        warnings.warn(
            f"{others[0]!r} and {len(others) - 1} more of this model's parameters are stepped by no optimizer that"
            " attach was given: whatever steps them, each rank does it by itself, and they are not exchanged. Give all"
            " optimizers as a list, or freeze these parameters.",
            SparDLWarning,
            stacklevel=5,
        )
    return found


def size_of(optimizers: Sequence[Optimizer]) -> int:
    """How many parameters they step together."""
    return sum(len(group["params"]) for each in optimizers for group in each.param_groups)
