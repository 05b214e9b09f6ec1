"""`spardl train --dashboard-file` leaves a page behind; what cannot be written is refused before any rank starts."""

import json
import re
from pathlib import Path

import pytest

from commands import spardl
from forked import spardl_forked

SMALL = ("train", "--workers", 2, "--recipe", "digits", "--max-steps", 4)


def test_a_run_leaves_its_page_and_says_where_it_was_live(tmp_path: Path) -> None:
    """With the loss of every step, what was sent, and the test at the end."""
    target = tmp_path / "run.html"
    done = spardl_forked(2, *SMALL, "--dashboard", "--dashboard-file", target)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^spardl: the dashboard is at http://127\.0\.0\.1:\d+/$", done.stderr, re.MULTILINE)
    assert f"spardl: the dashboard is kept in {target}\n" in done.stderr
    page = target.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    run = json.loads(data)
    assert run["title"] == "digits, spardl" and run["workers"] == 2 and run["steps"] == 4
    assert [step for step, _ in run["curves"]["loss of this rank"]] == [1, 2, 3, 4]
    assert len(run["curves"]["bytes sent"]) == 4
    assert {"test accuracy", "samples per second", "density"} <= set(run["curves"])
    assert run["groups"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--dashboard-file", "run.txt"), "cannot write a page to run.txt: give it a name that ends in .html or .htm."),
        (("--dashboard", "70000"), "'70000' is not a port"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: tuple[str, ...], sentence: str) -> None:
    done = spardl(*SMALL, *options)
    assert done.returncode == 2
    assert done.stdout == "" and sentence in done.stderr
