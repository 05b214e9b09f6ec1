"""Packages that only some features need, and the sentence that says which one is missing. No torch here.

The sentence names the package itself: `pip install matplotlib` works wherever spardl came from, a clone or an index.
"""

import importlib.util

from spardl.errors import ConfigError

# What a package is called where it is installed, where that differs from what is imported.
INSTALLED_AS = {"sklearn": "scikit-learn", "PIL": "pillow"}


def is_installed(module: str) -> bool:
    """Whether this module can be imported. It is looked for, not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def how_to_install(module: str) -> str:
    """`pip install matplotlib`: the command that brings this module."""
    return f"pip install {INSTALLED_AS.get(module, module)}"


def require(module: str, what: str) -> None:
    """Refuse what cannot work without this module; `what` says in a few words what it does here."""
    if not is_installed(module):
        raise ConfigError(f"{what}, which is not installed; install it with: {how_to_install(module)}")
