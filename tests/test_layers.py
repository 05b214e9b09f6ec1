"""Each layer imports only from the layers below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "spardl"

# From the ground up. Modules on one line may import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("version", "errors", "config", "metrics", "blocks", "agreement"),
    ("kernels",),
    ("sparse",),
    ("accumulator",),
    ("wire",),
    ("collectives",),
    ("transport",),
    ("sync", "allreduce", "simulation", "diagnosis"),
    ("planning",),
    ("integrations",),
    ("train",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> str:
    """`spardl.wire.frame` belongs to `wire`; `spardl` itself is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    relative = path.relative_to(SOURCE.parent).with_suffix("")
    parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
    return ".".join(parts)


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything of spardl that a file imports, also inside functions."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from spardl import sync` imports the module spardl.sync, not only the package.
            known = stem == "spardl" and [alias.name for alias in node.names if alias.name in LEVEL]
            names = [f"spardl.{name}" for name in known] if known else [stem]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "spardl":
                yield node.lineno, name


def violations() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        own = layer_of(module_name(path))
        where = path.relative_to(SOURCE.parent.parent)
        if own not in LEVEL:
            yield f"{where} belongs to no layer; give {own!r} its place in LAYERS."
            continue
        for line, imported in imported_modules(path):
            other = layer_of(imported)
            if other not in LEVEL:
                yield f"{where}:{line} imports {imported}, which belongs to no layer."
            elif LEVEL[other] > LEVEL[own]:
                yield f"{where}:{line} imports {imported}, but {other} lies above {own}; move what both need down."


def test_layers_import_only_downwards() -> None:
    """No module reaches up: the command line knows the training loop, never the other way round."""
    found = list(violations())
    assert not found, "\n".join(found)


def test_every_file_was_looked_at() -> None:
    """The check sees imports at all: the command line does import the settings."""
    assert any(name == "spardl.config" for _, name in imported_modules(SOURCE / "cli" / "options.py"))
