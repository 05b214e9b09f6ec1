"""Pages lead where they say, quote what the code says, and become a site."""

import ast
import functools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import spardl
from processes import on_processes
from spardl.cli.commands import COMMANDS, parse
from spardl.extras import is_installed
from training import all_equal, loss_of, mlp, weights_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.md")])
# What the site makes of files at the root of the repository.
MADE = {DOCS / "changelog.md", DOCS / "contributing.md", DOCS / "examples.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:|#", target):
            continue
        file = (page.parent / target.partition("#")[0]).resolve()
        assert file.exists() or file in MADE, f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_powers_stand_in_code_or_they_would_turn_bold(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.findall(r"\w\*\*[\d(].*", text)


def commands_of(page: Path) -> Iterator[str]:
    """Lines of shell blocks that start a command of ours, whatever launcher stands before it; not those that read a
    file which the reader has."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            words = shlex.split(line, comments=True)
            starts = [
                index for index, word in enumerate(words[:-1]) if word == "spardl" and words[index + 1] in COMMANDS
            ]
            if starts and "--config" not in words:
                yield shlex.join(words[starts[0] + 1 :])


COMMAND_LINES = sorted({line for page in PAGES for line in commands_of(page)})


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_that_a_page_shows_is_understood(line: str) -> None:
    assert parse(shlex.split(line)).run


def test_pages_show_commands() -> None:
    assert len(COMMAND_LINES) > 20


def _as_the_readme_says(rank: int, workers: int, script: str) -> tuple[int, Tensor]:
    names = {
        "torch": torch,
        "MyModel": mlp,
        "data": range(3),
        "loss_of": lambda model, step: loss_of(model, rank, step),
    }
    exec(script, names)
    return names["sync"].stats().total.steps, weights_of(names["model"])


def test_the_first_lines_of_the_readme_run_as_they_stand() -> None:
    """With a model in the place of MyModel, and data, two ranks train it and end with the same one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
    script = "\n".join(line[1:] for line in diff.splitlines())
    ranks = on_processes(2, _as_the_readme_says, script)
    assert all(steps >= 3 for steps, _ in ranks)
    assert all_equal(weights for _, weights in ranks)


def literals() -> Iterator[str]:
    """Every text in the source, with a blank mark where something is put in."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@functools.cache
def source_texts() -> str:
    """With constants that sentences are put together from in their places, as far as the quotations need them."""
    from spardl.transport.failures import INTACT

    return "\n".join(literals()).replace("its process may be gone. \0", f"its process may be gone. {INTACT}")


QUOTATIONS = [
    line.removeprefix("> ")
    for line in (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("> ")
]


@pytest.mark.parametrize("quotation", QUOTATIONS)
def test_a_sentence_that_troubleshooting_quotes_is_still_said(quotation: str) -> None:
    """The dots stand for whatever is put in; the words around them are in one text, in this order."""
    words = [re.escape(part.strip()) for part in quotation.split("...") if part.strip()]
    assert re.search(r"[^\n]*?".join(words), source_texts()), quotation


def test_troubleshooting_quotes_enough_to_be_worth_reading() -> None:
    assert len(QUOTATIONS) > 20


def _least() -> dict[str, str]:
    """What pyproject.toml asks for at least, of each package and of Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    return dict(re.findall(r"^([^>=\s]+)>=([\d.]+)", "\n".join([*wanted, "Python" + project["requires-python"]]), re.M))


def test_the_versions_that_compatibility_names_are_those_that_are_installed_and_asked_for() -> None:
    """Tested is what constraints.txt pins; what is not pinned there, the table says is run by hand."""
    page = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) and newer \| (.*)$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == {"Python", "torch", "lightning", "accelerate", "transformers", "ray[train]"}
    for name, tested, accepted, what in rows:
        assert accepted == _least()[name], name
        assert tested == pinned.get(name) or name == "Python" or "by hand" in what, name


def test_the_reference_has_every_public_name() -> None:
    """What `import spardl` shows; errors come from their module, all at once."""
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    public = {name for name in spardl.__all__ if not (name.startswith("__") or hasattr(spardl.errors, name))}
    assert "spardl.errors" in named
    assert {f"spardl.{name}" for name in public} <= named


def test_every_picture_is_in_the_gallery() -> None:
    gallery = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert {path.name for path in (DOCS / "pictures").iterdir()} == set(re.findall(r"\(pictures/([^)]+)\)", gallery))


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("mkdocs"), reason="needs mkdocs: pip install mkdocs-material")
def test_the_pages_become_a_site_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` does it: pages that nav forgets, and links and anchors that lead nowhere, are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "Synchronise this model sparsely from now on" in api
    # Nothing is loaded from elsewhere.
    assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?://', api)
