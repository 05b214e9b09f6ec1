"""Pages lead where they say, quote what the code says, and become a site."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spardl.extras import is_installed

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
