"""What the site needs beside the pages of docs/: README as its first page, the changelog, the examples, and links among them.

In the repository, pages link to files beside docs/ (`../examples/ddp.py`); on the site these are parts of other pages.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
GENERATED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files beside docs/."""
    for target, source in GENERATED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=_from_root(text)))
    files.append(File.generated(config, "examples.md", content=_examples()))
    return files


def _examples() -> str:
    parts = ["# Examples", "Each is one file that a person reads from top to bottom, and a test runs it as it stands (`ray_train.py` where Ray is installed)."]
    for name in SCRIPTS:
        code = (ROOT / "examples" / name).read_text(encoding="utf-8").rstrip()
        parts.append(f"## {name}\n\n```python\n{code}\n```")
    return "\n\n".join(parts) + "\n"


def _from_root(text: str) -> str:
    """Links of a file at the root, as those of a page in docs/."""
    text = re.sub(r"\]\((examples|src|tests)/", r"](../\1/", text)
    for target, source in GENERATED.items():
        text = text.replace(f"]({source}", f"]({target}")
    return text.replace("](docs/", "](")


def on_page_markdown(markdown: str, page: Page, **_others: object) -> str:
    """Links to scripts lead to where the site shows them; other files of the repository are named, not linked."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(
        r"\]\((?:\.\./)+examples/(\w+)\.py\)", lambda found: f"]({up}examples.md#{found[1]}py)", markdown
    )
    markdown = re.sub(r"\]\((?:\.\./)+examples/two_machines\.md\)", f"]({up}tutorial.md)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+SECURITY\.md\)", f"]({up}security.md)", markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests|benchmarks)/[^)]*\)", r"\1", markdown)
