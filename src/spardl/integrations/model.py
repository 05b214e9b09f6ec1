"""What of a DistributedDataParallel model is synchronised, and under which names."""

from torch.nn import Embedding, EmbeddingBag, Parameter
from torch.nn.parallel import DistributedDataParallel

from spardl import _torch_private
from spardl.errors import ConfigError
from spardl.sync.plan import Member

COMPILED = "_orig_mod."  # what torch.compile puts before names


def unwrap(model: object) -> DistributedDataParallel:
    """The DDP model itself, also of one that was compiled after wrapping.

    Raises:
        ConfigError: this is no DDP model, or it has a communication hook already.
    """
    inner = _torch_private.uncompiled(model)
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(f"attach needs a DistributedDataParallel model, not {type(model).__name__}; wrap it first.")
    if _torch_private.has_comm_hook(inner):
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


def facts_of(parameters: dict[str, Parameter]) -> list[object]:
    """What ranks compare to know that they have the same model."""
    return [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in parameters.items()]
