"""Each layer imports only from the layers below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "spardl"

# From the ground up. Modules on one line may import each other. A module may lie lower than its package: what travels
# is described where the settings, which list the formats, and the kernels, which write them, can see it.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "version",
        "errors",
        "extras",
        "choices",
        "update",
        "density",
        "update",
        "metrics",
        "agreement",
        "machine",
        "host",
        "_torch_private",
        "wire.format",
    ),
    ("kernels",),
    ("sparse",),
    ("wire",),
    ("memory",),
    ("dashboard",),
    ("collectives",),
    ("config",),
    ("transport",),
    ("sync",),
    ("allreduce", "simulator"),
    ("planning",),
    ("integrations",),
    ("launch",),
    ("bench",),
    ("train",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
# Neighbours of which none imports another, whatever their order above.
APART = ("launch", "bench", "train")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> str:
    """`spardl.wire.frame` belongs to `wire`, if it has no layer of its own; `spardl` itself is `__init__`."""
    parts = module.split(".")
    own = ".".join(parts[1:3])
    return own if own in LEVEL else parts[1] if len(parts) > 1 else "__init__"


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
            elif other != own and {own, other} <= set(APART):
                yield f"{where}:{line} imports {imported}, but {own} and {other} stand apart; pass it in."


def test_layers_import_only_downwards() -> None:
    """No module reaches up: the command line knows the training loop, never the other way round."""
    found = list(violations())
    assert not found, "\n".join(found)


def test_every_file_was_looked_at() -> None:
    """The check sees imports at all: the command line does import the settings."""
    assert any(name == "spardl.config" for _, name in imported_modules(SOURCE / "cli" / "options.py"))


# What programs may know of memory: its one face, the frames that it makes, and how a vector is dealt to blocks.
FACES = {"spardl.memory.memory", "spardl.memory.frames", "spardl.memory.layout"}


def test_programs_see_memory_through_its_one_face() -> None:
    """No collective imports buffers, transactions, policies or velocities, nor looks into what memory keeps private."""
    for path in sorted((SOURCE / "collectives").rglob("*.py")):
        for line, name in imported_modules(path):
            assert not name.startswith("spardl.memory") or name in FACES, f"{path.name}:{line} imports {name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                assert owner == "self", f"{path.name}:{node.lineno} reaches into {owner}.{node.attr}"


def test_properties_of_memory_and_sync_change_nothing() -> None:
    """A property returns what is there: it assigns no attribute and calls nothing that adds, takes or waits."""
    busy = {"add_up", "take_largest", "wait", "give_up", "begin", "commit", "rollback"}
    for folder in ("memory", "sync"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in node.decorator_list):
                    where = f"{path.name}:{node.lineno} {node.name}"
                    for inner in ast.walk(node):
                        changes = isinstance(getattr(inner, "ctx", None), ast.Store | ast.Del)
                        assert not changes or isinstance(inner, ast.Name | ast.Tuple), where
                        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                            assert inner.func.attr not in busy, where


def test_no_class_in_the_middle_has_grown_beyond_twenty_methods() -> None:
    for folder in ("sync", "memory", "integrations"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                    assert len(methods) <= 20, f"{path.name}: {node.name} has {len(methods)} methods"
