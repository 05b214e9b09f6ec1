"""Methods by name. A method is one file plus one line here; packages add theirs as entry points.

A package that declares, in its pyproject.toml,

    [project.entry-points."spardl.methods"]
    mine = "my_package.mine:Mine"

has its method wherever a method can be named. No module of a method imports torch, so that the command line can list
what all of them offer without it.
"""

import functools
import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from spardl.choices import check_choice
from spardl.errors import ConfigError

if TYPE_CHECKING:
    from spardl.collectives.method import Method

ENTRY_POINTS = "spardl.methods"

METHODS: dict[str, str] = {
    "dense": "spardl.collectives.methods.dense:Dense",
    "dense-ring": "spardl.collectives.methods.dense:DenseRing",
    "dense-rhd": "spardl.collectives.methods.dense:DenseHalvingDoubling",
    "topka": "spardl.collectives.methods.topka:TopkA",
    "topka2": "spardl.collectives.methods.topka:TopkA2",
    "topkdsa": "spardl.collectives.methods.topkdsa:TopkDSA",
    "chunktopk": "spardl.collectives.methods.chunktopk:ChunkTopk",
    "gtopk": "spardl.collectives.methods.gtopk:GTopk",
    "oktopk": "spardl.collectives.methods.oktopk:OkTopk",
    "exdyna": "spardl.collectives.methods.exdyna:ExDyna",
    "micro": "spardl.collectives.methods.exdyna:MiCRO",
    "deft": "spardl.collectives.methods.deft:Deft",
    "spardl": "spardl.collectives.methods.spardl:SparDL",
}


def register(name: str, where: str) -> None:
    """Make a method known in this process, as `module:Class`.

    Raises:
        ConfigError: another method has this name.
    """
    if name in METHODS and METHODS[name] != where:
        raise ConfigError(f"there is a method {name!r} already, {METHODS[name]}; choose another name.")
    METHODS[name] = where
    method_class.cache_clear()


def method_names() -> tuple[str, ...]:
    """All methods, those of installed packages included."""
    return (*METHODS, *(name for name in _installed() if name not in METHODS))


@functools.cache
def _installed() -> dict[str, str]:
    return {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


@functools.cache
def method_class(name: str) -> "type[Method]":
    """The class registered under this name.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    check_choice("method", name, method_names(), hint="`spardl methods` lists them")
    where = METHODS.get(name) or _installed()[name]
    module, _, attribute = where.partition(":")
    try:
        found: type[Method] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the method {name!r} is registered as {where}, which cannot be loaded: {error}.") from error
    return found
