"""A dashboard shows what a rank sees of a run: on loopback, from one file, with text as text."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from spardl.dashboard.history import MOST, Curve, History
from spardl.dashboard.page import render
from spardl.dashboard.server import Dashboard
from spardl.errors import ConfigError, PeerError, StateError
from spardl.metrics import GroupStats, Span, StepEvent


def event(step: int, *, counted: bool = True) -> StepEvent:
    return StepEvent(step, seconds=0.01, counted=counted, groups=1, elements=1000, entries=10, bytes_sent=40)


def read(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture
def board():
    board = Dashboard("a run", workers=2)
    board.serve()
    yield board
    board.close()


def test_the_page_and_its_data_are_served_on_loopback(board: Dashboard) -> None:
    """Steps and values of a script's own are there when they have happened."""
    assert board.url.startswith("http://127.0.0.1:")
    board.history.step(event(0))
    board.history.step(event(1, counted=False))
    board.log(1, loss=2.5)
    data = json.loads(read(board.url + "data.json"))
    assert (data["steps"], data["refused"], data["bytes_sent"], data["workers"]) == (2, 1, 80, 2)
    assert data["curves"]["loss"] == [[1, 2.5]]
    assert data["curves"]["density"] == [[0, 0.01], [1, 0.01]]
    assert "<title>a run</title>" in read(board.url)


def test_nothing_else_is_served(board: Dashboard) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(board.url + "../../etc/passwd")


def test_a_name_that_somebody_made_lead_to_loopback_is_refused(board: Dashboard) -> None:
    with pytest.raises(urllib.error.HTTPError, match="403"):
        read(board.url, Host="evil.example:80")


def test_a_port_in_use_is_a_sentence(board: Dashboard) -> None:
    port = int(board.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot use port {port}"):
        Dashboard("another").serve(port)


def test_after_close_nobody_listens_and_what_was_seen_is_kept(board: Dashboard, tmp_path: Path) -> None:
    board.history.step(event(0))
    url = board.url
    board.close()
    with pytest.raises(urllib.error.URLError):
        read(url)
    board.export(tmp_path / "run.html")
    assert '"steps": 1' in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_text_cannot_become_a_part_of_the_page() -> None:
    """Neither in the title nor in the data."""
    history = History("</title><script>alert(1)</script>", 1, {"</script><img src=x>": "</script>"})
    page = render(history.snapshot(), live=False)
    assert "<script>alert" not in page and "<img" not in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data)["facts"] == {"</script><img src=x>": "</script>"}


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = render(History("a run", 1, {}).snapshot(), live=True)
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://|src=|@import", without_namespace)
    assert "default-src &#x27;none&#x27;" in page


def test_a_curve_keeps_its_shape_and_its_end_however_long_it_is() -> None:
    curve = Curve()
    for step in range(10 * MOST + 7):
        curve.add(step, float(step))
    points = curve.shown()
    assert MOST / 2 < len(points) <= MOST + 1
    assert points[0] == (0, 0.0) and points[-1] == (10 * MOST + 6, 10.0 * MOST + 6)
    gaps = {after[0] - before[0] for before, after in itertools.pairwise(points[:-1])}
    assert len(gaps) == 1


def test_a_value_that_is_not_finite_is_left_out() -> None:
    """JSON has no word for it."""
    history = History("a run", 1, {})
    history.log(1, {"loss": float("nan")})
    history.log(2, {"loss": 1.0})
    assert history.snapshot()["curves"] == {"loss": [(2, 1.0)]}


def test_a_failure_names_its_rank_and_the_end_of_a_session_is_none() -> None:
    history = History("a run", 4, {})
    history.ask_for_failure(lambda: PeerError("rank 3 is gone", peer=3))
    assert history.snapshot()["failure"] == {"text": "rank 3 is gone", "peer": 3}
    history.ask_for_failure(lambda: StateError("this session has ended"))
    assert history.snapshot()["failure"] is None


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIETLY = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def in_a_browser(page: Path) -> str:
    """The page as a browser has it once its script has run."""
    command = [CHROMIUM, *QUIETLY, "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_curves_groups_and_ranks(tmp_path: Path) -> None:
    """Without a server, from the file alone, and with whatever names there are."""
    board = Dashboard("a run", workers=3)
    for step in range(3):
        spans = (Span("layer4.* <b>", 0.001, 0.004), Span("layer1.*", 0.004, 0.008))
        board.history.step(dataclasses.replace(event(step), spans=spans))
        board.log(step, loss=1.0 / (step + 1))
    board.history.groups([GroupStats("layer4.* <b>", 1000, steps=3, bytes_sent=120).to_dict()])
    board.export(tmp_path / "run.html")
    drawn = in_a_browser(tmp_path / "run.html")
    assert "All 3 ranks took part in the last step." in drawn
    assert len(re.findall(r"<path d=.M[0-9. L]+", drawn)) == 4  # loss, seconds, bytes, density
    assert len(re.findall(r"<rect x=", drawn)) == 2
    assert ">sent per step: <" in drawn and ">0 B</text>" in drawn  # amounts begin at nothing
    assert "layer4.* &lt;b&gt;: 1 ms to 4 ms" in drawn and "<b>:" not in drawn
    assert len(re.findall(r'class="fine"', drawn)) == 3


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_one_slow_step_does_not_flatten_the_others(tmp_path: Path) -> None:
    """The axis ends a little above what is usual, and the caption says how long the slow one took."""
    board = Dashboard("a run")
    for step in range(100):
        board.history.step(dataclasses.replace(event(step), seconds=30.0 if step == 50 else 0.01 + 1e-4 * step))
    board.export(tmp_path / "run.html")
    drawn = in_a_browser(tmp_path / "run.html")
    assert "(at most 30 s)" in drawn and ">10 ms</text>" in drawn and ">10 s</text>" not in drawn


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_who_is_to_blame_and_what_ranks_say(tmp_path: Path) -> None:
    history = History("a run", 3, {})
    history.step(event(0))
    history.ask_for_failure(lambda: PeerError("rank 2 is gone", peer=2))
    history.ask_ranks_by(lambda: [("fine", "computes"), ("waits", "has waited 3.0 s for 2"), ("bad", "is gone")])
    snapshot = history.snapshot(live=True)
    (tmp_path / "run.html").write_text(render(snapshot, live=False), encoding="utf-8")
    drawn = in_a_browser(tmp_path / "run.html")
    assert "has waited 3.0 s for 2" in drawn and "rank 2 is gone" in drawn
    assert re.findall(r'<span class="(\w+)">[012]</span>', drawn) == ["fine", "waits", "bad"]
