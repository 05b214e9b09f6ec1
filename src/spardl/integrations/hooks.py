"""Hooks that stay with the model they were put on: copies and pickles of it do not carry them along."""

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import unserializable_hook


class Hook:
    """A callable that becomes one which does nothing wherever the model is copied or pickled to."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.__name__ = getattr(call, "__name__", "hook")
        unserializable_hook(self)

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())


def nothing(*_: Any) -> None:
    """What a hook is on a copy."""


def _nothing() -> Callable[..., None]:
    return nothing
