"""A setting is declared once; the command line and the documents say what the declaration says."""

import ast
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spardl
from spardl.choices import declared
from spardl.cli.commands import build_parser, parse
from spardl.cli.options import sync_config, training_config
from spardl.cli.settings_table import markdown, rows
from spardl.cli.updates import UPDATE
from spardl.collectives.methods.registry import METHODS
from spardl.config import SyncConfig, options_of
from spardl.density import DensitySchedule
from spardl.update import LocalUpdates

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

COMMON = {field.name: field for field in declared(SyncConfig)}
OPTIONS = {name: field for method in METHODS for name, field in options_of(method).items()}
LOCAL = {field.name: field for field in declared(LocalUpdates)}
SETTINGS = COMMON | OPTIONS | {"update": UPDATE} | LOCAL


def test_the_table_in_the_guide_is_made_from_the_declarations() -> None:
    """Whoever changes a setting pastes what this prints, and nothing else."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"<!-- settings: .*? -->\n\n(.*?)\n\n<!-- end of settings -->", text, re.DOTALL)
    assert found == markdown(), f"the table of docs/settings.md is out of date; replace it by\n\n{markdown()}"


def test_the_table_has_every_setting_once() -> None:
    assert [row.setting for row in rows()] == list(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_an_option_of_training_with_the_same_text_and_default(name: str) -> None:
    """Options of single methods are None where they are not given, and name the methods that have them; so are those of
    local updates."""
    field = SETTINGS[name]
    options = {text: action for action in build_parser()[1]["train"]._actions for text in action.option_strings}
    action = options["--" + name.replace("_", "-")]
    assert action.dest == name
    assert field.metadata["text"].replace("`", "").replace("%", "%%") in str(action.help)
    assert action.default == (None if name in OPTIONS | LOCAL else field.default)
    if name in OPTIONS | LOCAL:
        (row,) = (row for row in rows() if row.setting == name)
        assert str(action.help).startswith(f"{row.methods}: ")
        assert f"(default: {row.default})" in str(action.help)


# --- what documents show ----------------------------------------------------------------------------------------------


def pieces_of_code(page: Path) -> Iterator[str]:
    """Fenced blocks, and what stands between backticks elsewhere."""
    text = page.read_text(encoding="utf-8")
    fenced = r"^ *```\w*\n(.*?)^ *```"
    yield from re.findall(fenced, text, re.DOTALL | re.MULTILINE)
    yield from (
        found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", re.sub(fenced, "", text, flags=re.S | re.M))
    )


def commands_in(page: Path) -> Iterator[str]:
    """Every `spardl COMMAND ...` of a page, without what starts it, comments, and line ends."""
    for code in pieces_of_code(page):
        for line in code.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|\s)spardl ([a-z].*)", line.split(" #")[0])
            if found is not None and "--gain" not in line:  # tests/examples run this one
                yield found[1].strip()


COMMANDS = sorted({command for page in PAGES for command in commands_in(page)})
STANDS_FOR_SOMETHING = re.compile(r"\b[A-Z]{2,}\b")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_the_documents_is_one(command: str) -> None:
    """Its options exist, and take what they are given."""
    name, *arguments = shlex.split(command)
    if "--config" in arguments:
        pytest.skip("reads a file, which the page shows")
    if arguments and arguments[-1].startswith("--") and arguments[-1] != "--settings":  # the option itself is meant
        assert arguments.pop() in build_parser()[1][name]._option_string_actions
    options = parse([name, *arguments])
    if "density_warmup" in options and "method" in options and not STANDS_FOR_SOMETHING.search(command):
        config, chooses = training_config(options) if name == "train" else (sync_config(options), False)
        assert chooses or config.method == options.method


CALLS: dict[str, Callable[..., Any]] = {
    "attach": spardl.attach,
    "all_reduce": spardl.all_reduce,
    "simulate": spardl.simulate,
    "DensitySchedule": DensitySchedule,
    "SyncConfig": SyncConfig,
}
OF_THE_EXAMPLE = {"gain"}  # of the method that docs/write-a-method.md writes


def calls_in(page: Path) -> Iterator[tuple[str, str]]:
    """The function and the keyword, for every keyword of a call of ours."""
    for code in pieces_of_code(page):
        for name, call in re.findall(rf"\b({'|'.join(CALLS)})(\((?:[^()]|\([^()]*\))*\))", code):
            given = re.sub(r",\s*\.\.\.\)$", ")", call.replace("\n", " "))
            tree = ast.parse(f"{name}{given}", mode="eval").body
            assert isinstance(tree, ast.Call)
            yield from ((name, str(keyword.arg)) for keyword in tree.keywords)


USES = sorted({use for page in PAGES for use in calls_in(page)})


@pytest.mark.parametrize(("function", "keyword"), USES)
def test_a_keyword_in_the_documents_exists(function: str, keyword: str) -> None:
    known = set(inspect.signature(CALLS[function]).parameters)
    if "settings" in known:
        known |= set(SETTINGS) | OF_THE_EXAMPLE
    assert keyword in known


def test_a_setting_with_a_value_in_the_documents_is_one() -> None:
    """`name=value` between backticks."""
    known = {name for call in CALLS.values() for name in inspect.signature(call).parameters} | set(SETTINGS)
    others = {"commit", "dense", "by_blocks", "choices"}  # of a session, and of who writes a method
    # Of Lightning, Accelerate and the Trainer, on their pages.
    others |= {"strategy", "precision", "ckpt_path", "mixed_precision", "save_only_model", "ddp_find_unused_parameters"}
    others |= {"fsdp", "fsdp_config", "parallelism_config"}
    for page in PAGES:
        for code in pieces_of_code(page):
            found = re.match(r"([a-z_]+)=", code)
            assert found is None or found[1] in known | others, f"{page.name}: {code}"


def test_an_option_in_the_documents_is_one() -> None:
    """`--name value` between backticks, of whatever command; so have srun, torchrun, benchmarks and a method."""
    known = {option for parser in build_parser()[1].values() for option in parser._option_string_actions}
    others = {"--distribution", "--gain", "--node-rank", "--standalone", "--trials", "--case", "--kill-on-bad-exit"}
    for page in PAGES:
        for code in pieces_of_code(page):
            if code.startswith("--"):
                found = set(re.findall(r"(?:^|\s)(--[a-z-]+)", code))
                assert found <= known | others, f"{page.name}: {code}"


@pytest.mark.parametrize(
    ("page", "methods"), [("spardl", ("spardl",)), ("exdyna", ("exdyna", "micro", "deft"))], ids=["spardl", "exdyna"]
)
def test_the_options_on_a_systems_page_are_its_own_or_everybodys(page: str, methods: tuple[str, ...]) -> None:
    """And none of its own is missing there."""
    text = (ROOT / "docs" / "systems" / f"{page}.md").read_text(encoding="utf-8")
    table = text.split("## Options\n")[1].split("\n## ")[0]
    told = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    own = {name for method in methods for name in options_of(method)}
    assert told <= own | set(COMMON)
    assert own <= told


def test_the_search_finds_what_it_looks_for() -> None:
    """The checks above see the documents at all."""
    assert len(COMMANDS) > 30
    assert ("attach", "merge") in USES
    assert ("all_reduce", "density") in USES
