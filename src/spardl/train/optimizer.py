"""The optimizer that settings ask for."""

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from spardl.train.settings import TrainSettings


def build_optimizer(model: nn.Module, settings: TrainSettings) -> Optimizer:
    """One for all parameters; those that do not decay are a group of their own."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decaying = [each for each in parameters if settings.decays_all or each.dim() >= 2]
    chosen = {id(parameter) for parameter in decaying}
    others = [parameter for parameter in parameters if id(parameter) not in chosen]
    groups = [{"params": decaying, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    kind = AdamW if settings.optimizer == "adamw" else Adam
    return kind(groups, lr=settings.lr, betas=settings.betas, eps=settings.epsilon)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
