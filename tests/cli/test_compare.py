"""Several methods side by side: who is run, what the table says, and a page that needs nothing but itself."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from commands import RANK_VARIABLES, json_lines
from forked import spardl_forked
from spardl.cli import execute
from spardl.cli.commands import parse
from spardl.cli.compare import chosen_entries, chosen_recipes, chosen_seeds, title_of
from spardl.cli.curves import INK, OVER_BYTES, OVER_STEPS, OVER_TIME, Curve, as_svg, best_of, points, reference
from spardl.cli.goals import how_soon
from spardl.cli.page import render
from spardl.cli.summary import Summary, summarise
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.train.report import EpochReport, Reading, SyncCosts, TrainReport
from spardl.train.rivals import RIVALS
from spardl.train.settings import TrainSettings
from spardl.update import LocalUpdates, resolve

# What its fixtures start is started once, not once per process that runs tests.
pytestmark = pytest.mark.xdist_group("compare")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "hr", "img", "link", "input"}


def entries_of(*arguments: str) -> list[tuple[str, str, bool]]:
    return [(each.label, each.config.method, each.chooses) for each in chosen_entries(parse(["compare", *arguments]))]


def test_auto_takes_part_like_a_method() -> None:
    assert entries_of("--methods", "dense,auto") == [("dense", "dense", False), ("auto", "spardl", True)]
    both = entries_of("--methods", "auto,spardl", "--teams", "2", "--densities", "0.1,0.01")
    assert both == [
        (f"{name} {share}", "spardl", name == "auto") for name in ("spardl", "auto") for share in ("10 %", "1 %")
    ]
    assert ("auto 1 %, local", "spardl", True) in entries_of("--methods", "auto", "--updates", "local,diloco")


def run_of(method: str, scores: list[float | None], *, seed: int = 0, **changes: Any) -> TrainReport:
    """A run that took 2 s per epoch and sent 1 MB in each; None: an epoch that was not tested."""
    seconds, sent, lr = changes.pop("seconds", 2.0), changes.pop("sent", 1e6), changes.pop("lr", 0.1)
    metric = changes.setdefault("metric", "accuracy")
    epochs = [
        EpochReport(
            epoch=number,
            step=10 * number,
            train_loss=0.5,
            figures={} if score is None else {"loss": 0.4, metric: score},
            lr=0.1,
            seconds=seconds,
            samples_per_second=100.0,
            costs=SyncCosts(rounds=20, bytes_sent=sent, entries_sent=1000, entries=500, places=10_000),
        )
        for number, score in enumerate(scores, start=1)
    ]
    readings = [
        Reading(report.step, seconds * report.epoch, sent * report.epoch, report.figures)
        for report in epochs
        if report.figures
    ]
    facts: dict[str, Any] = {
        "recipe": "digits",
        "model": "digits-cnn",
        "data": "digits",
        "method": method,
        "workers": 2,
        "better": "higher",
        "settings": TrainSettings(epochs=len(scores), batch_size=16, lr=lr, seed=seed),
        "config": SyncConfig(method="dense" if method in RIVALS else method),
        "parameters": 1000,
        "steps": 10 * len(scores),
        "density": 0.01,
        "parameters_sha256": "0123456789abcdef",
    }
    return TrainReport(**{**facts, **changes}, epochs=epochs, readings=readings)


def column(name: str, curves: list[Curve], rates: Sequence[float] = ()) -> dict[str, str]:
    """What the table says under this name, by label."""
    return column_of(name, summarise(curves, rates))


def column_of(name: str, summary: Summary | None) -> dict[str, str]:
    assert summary is not None
    place = summary.columns.index(name)
    return {row[0]: row[place] for row in summary.rows}


def page_of(curves: list[Curve], *arguments: str) -> str:
    soon = how_soon(curves)
    return render([summarise(curves), *([soon] if soon else [])], curves, ["compare", *arguments])


# --- what is run ----------------------------------------------------------------------------------------------------


def test_sparse_methods_run_at_each_density_and_dense_ones_once() -> None:
    """In the order of the names, labelled with the density."""
    options = parse(["compare", "--methods", "dense,spardl,topka", "--densities", "0.01,0.001,0.01"])
    found = {entry.label: entry.config.density for entry in chosen_entries(options)}
    assert list(found) == ["dense", "spardl 1 %", "spardl 0.1 %", "topka 1 %", "topka 0.1 %"]
    assert found["topka 0.1 %"] == 0.001


def test_a_warm_up_ends_at_each_density() -> None:
    """--density-warmup begins alike and comes down to where the run is meant to be."""
    arguments = ["--methods", "spardl", "--densities", "0.01,0.001", "--density-warmup", "0.25:50"]
    schedules = [entry.config.density for entry in chosen_entries(parse(["compare", *arguments]))]
    assert schedules == [DensitySchedule(target=target, start=0.25, steps=50) for target in (0.01, 0.001)]


def test_every_run_starts_from_each_seed() -> None:
    """Only the seed differs."""
    first, second = chosen_seeds(parse(["compare", "--recipe", "vgg16-cifar10", "--epochs", "12", "--seeds", "3,5"]))
    assert (first.settings.seed, second.settings.seed) == (3, 5)
    assert first.changed(seed=5) == second


def test_every_run_is_done_at_each_learning_rate() -> None:
    """From each seed; a title tells them apart."""
    options = parse(["compare", "--lrs", "0.1,0.2,0.1", "--seeds", "3,5"])
    recipes = chosen_recipes(options)
    assert [(each.settings.seed, each.settings.lr) for each in recipes] == [(3, 0.1), (3, 0.2), (5, 0.1), (5, 0.2)]
    dense, _ = chosen_entries(options)
    assert title_of(dense, recipes[1], recipes) == "dense, lr 0.2, seed 3"
    assert title_of(dense, recipes[1], recipes[1:2]) == "dense"


def test_sparse_methods_run_under_each_update_rule_and_dense_ones_once() -> None:
    """Labelled with density and rule; a published way that sends everything runs once, whatever the methods."""
    options = parse(
        ["compare", "--methods", "dense,spardl,topka", "--updates", "gradients,local,diloco", "--every", "5"]
    )
    found = {entry.label: entry for entry in chosen_entries(options)}
    spardl = ["spardl 1 %, gradients", "spardl 1 %, local"]
    assert list(found) == ["dense", *spardl, "diloco", "topka 1 %, gradients", "topka 1 %, local"]
    assert found["dense"].rule is found["spardl 1 %, gradients"].rule is None
    assert found["topka 1 %, local"].rule == LocalUpdates(every=5)
    assert (found["diloco"].rule, found["diloco"].config.density) == (resolve("diloco", {"every": 5})[0], 1.0)


@pytest.mark.parametrize("density", [["--densities", "0.01"], ["--density", "0.01"]])
def test_a_density_that_was_asked_for_counts_under_published_ways_too(density: list[str]) -> None:
    """Though these send everything by themselves."""
    (entry,) = chosen_entries(parse(["compare", "--methods", "spardl", "--updates", "diloco", *density]))
    assert (entry.label, entry.config.density) == ("spardl 1 %, diloco", 0.01)


def test_a_file_may_list_what_is_compared(tmp_path: Path) -> None:
    """As people write several things in TOML."""
    path = tmp_path / "run.toml"
    path.write_text('densities = [0.01, 0.001]\nseeds = [0, 1]\nlrs = [0.1, 0.2]\nupdates = ["gradients", "local"]\n')
    options = parse(["compare", "--config", str(path)])
    assert (options.densities, options.seeds, options.lrs) == ((0.01, 0.001), (0, 1), (0.1, 0.2))
    assert options.updates == "gradients,local"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--densities", "0.01,1.5"], "outside (0, 1]"),
        (["--densities", "some"], "write it as 0.01,0.001"),
        (["--densities", ","], "names no density"),
        (["--densities", "0.1", "--density", "0.2"], "--density or --densities, not both"),
        (["--seeds", "0,-1"], "whole numbers from 0 on"),
        (["--seeds", ","], "names no seed"),
        (["--seeds", "1", "--seed", "2"], "--seed or --seeds, not both"),
        (["--lrs", ","], "names no learning rate"),
        (["--lrs", "0.1,0"], "a learning rate of 0.0 teaches nothing"),
        (["--lrs", "0.1", "--lr", "0.2"], "--lr or --lrs, not both"),
        (["--updates", ","], "names no rule"),
        (["--updates", "local,dilco"], "Did you mean diloco?"),
        (["--updates", "local", "--methods", "dense"], "add spardl there"),
        (["--updates", "gradients", "--every", "5"], "every is a setting of local updates"),
        (["--page", "page.pdf"], "ends in .html or .htm"),
        (["--page", "-"], "ends in .html or .htm"),
        (["--page", "no/such/folder/page.html"], "no folder"),
        (["--page", "{folder}/taken.html"], "it is a folder"),
        (["--pictures", "{folder}/file"], "is a file; name a folder"),
        (["--pictures", "{folder}/file/below"], "is a file; name a folder"),
        (["--pictures", "{folder}/taken"], "it is a folder"),
    ],
)
def test_what_cannot_work_is_refused_before_any_worker_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    """One sentence on standard error, exit code 2, and nothing written."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "taken.html").mkdir()
    (tmp_path / "taken" / f"{OVER_TIME}.png").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert execute(["compare", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err and len(captured.err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


# --- what the table and the pictures say ----------------------------------------------------------------------------


def test_every_test_is_a_point() -> None:
    """At its step, with the time and bytes until then; an epoch that was not tested is none."""
    found = points(run_of("spardl", [0.5, None, 0.9]))
    assert [(point.step, point.seconds, point.bytes_sent) for point in found] == [(10, 2.0, 1e6), (30, 6.0, 3e6)]


def test_speed_up_is_of_the_time_to_where_dense_ends() -> None:
    """Dense took 8 s to its end; a sparse run that is there after two epochs of 1 s is 4 times as fast."""
    curves = [
        Curve("dense", [run_of("dense", [0.5, 0.6, 0.7, 0.8], sent=4e6)]),
        Curve("spardl", [run_of("spardl", [0.7, 0.8, 0.7, 0.9], seconds=1.0)]),
        Curve("topka", [run_of("topka", [0.5, 0.6, 0.7, 0.79], seconds=1.0, sent=5e6)]),
    ]
    assert column("time to dense's end", curves) == {"dense": "8.00 s", "spardl": "2.00 s", "topka": "not reached"}
    assert column("speed-up", curves) == {"dense": "", "spardl": "4.00x faster", "topka": ""}
    assert column("against dense", curves) == {
        "dense": "",
        "spardl": "4.0x fewer bytes",
        "topka": "1.2x more bytes",
    }


def test_seeds_give_a_mean_and_a_spread() -> None:
    """Each seed is measured against dense from that seed; a speed-up needs all of them to come there."""
    curves = [
        Curve("dense", [run_of("dense", [0.5, 0.90]), run_of("dense", [0.5, 0.92], seed=1)]),
        Curve("spardl", [run_of("spardl", [0.90, 0.90]), run_of("spardl", [0.92, 0.94], seed=1)]),
        Curve("topka", [run_of("topka", [0.90, 0.90]), run_of("topka", [0.5, 0.91], seed=1)]),
    ]
    assert column("test accuracy", curves)["spardl"] == "92.00 ± 2.83 %"
    assert column("time to dense's end", curves) == {"dense": "4.00 s", "spardl": "2.00 s", "topka": "2.00 s (1 of 2)"}
    assert column("speed-up", curves) == {"dense": "", "spardl": "2.00x faster", "topka": ""}


TEN = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9]  # of dense: one test every ten steps


def test_steps_and_time_to_where_dense_was() -> None:
    """At its end and at 80 % of its steps, with the ratio to dense's own, or never."""
    curves = [
        Curve("dense", [run_of("dense", TEN)]),
        Curve(
            "spardl 1 %, local", [run_of("spardl", [0.4, 0.8, 0.8, 0.8, 0.9, 0.9], seconds=1.0, rule=LocalUpdates())]
        ),
        Curve("spardl 1 %, gradients", [run_of("spardl", [0.5] * 9 + [0.8])]),
    ]
    soon = how_soon(curves)
    assert column_of("steps to dense's 90.00 % (step 100)", soon) == {
        "dense": "100",
        "spardl 1 %, local": "50 (0.50x)",
        "spardl 1 %, gradients": "never",
    }
    assert column_of("time to 90.00 % (step 100)", soon)["spardl 1 %, local"] == "5.00 s (0.25x)"
    assert column_of("steps to dense's 80.00 % (step 80)", soon) == {
        "dense": "80",
        "spardl 1 %, local": "20 (0.25x)",
        "spardl 1 %, gradients": "100 (1.25x)",
    }
    assert column_of("time to 80.00 % (step 80)", soon)["dense"] == "16.0 s"


def test_each_seed_is_measured_against_dense_from_that_seed() -> None:
    """Means over seeds, and a ratio only where a method came there from all of them."""
    loss = {"metric": "loss", "better": "lower"}
    curves = [
        Curve("dense", [run_of("dense", [3, 2], **loss), run_of("dense", [4, 3], seed=1, **loss)]),
        Curve("spardl", [run_of("spardl", [2.0, 2.0], **loss), run_of("spardl", [3.1, 3.0], seed=1, **loss)]),
        Curve("topka", [run_of("topka", [2.1, 2.0], **loss), run_of("topka", [4.0, 3.1], seed=1, **loss)]),
    ]
    soon = how_soon(curves)
    assert column_of("steps to dense's 2.5000 (step 20)", soon) == {
        "dense": "20",
        "spardl": "15 (0.75x)",
        "topka": "20 (1 of 2 seeds)",
    }


def test_without_others_nobody_came_anywhere_sooner() -> None:
    assert how_soon([Curve("dense", [run_of("dense", TEN)])]) is None
    assert how_soon([Curve(name, [run_of(name, TEN)]) for name in ("spardl", "topka")]) is None
    one = [Curve(name, [run_of(name, [0.5])]) for name in ("dense", "topka")]
    assert column_of("steps to dense's 50.00 % (step 10)", how_soon(one)) == {"dense": "10", "topka": "10 (1.00x)"}


def test_rivals_take_part_and_ddp_as_it_is_is_what_others_are_measured_against() -> None:
    entries = chosen_entries(parse(["compare", "--methods", "dense,spardl", "--rivals", "powersgd-1,ddp,ddp"]))
    assert [(entry.label, entry.rival) for entry in entries][:3] == [
        ("powersgd-1", "powersgd-1"),
        ("ddp", "ddp"),
        ("dense", None),
    ]
    curves = [Curve(name, [run_of(name, [0.5, 0.9])]) for name in ("powersgd-1", "dense", "ddp", "spardl")]
    found = reference(curves)
    assert found is not None and found.label == "ddp"
    assert reference([curve for curve in curves if curve.label == "powersgd-1"]) is None


def test_dense_weights_are_no_reference_for_gradients() -> None:
    """What everything is measured against exchanges all gradients in every step."""
    averaged = Curve("dense, local", [run_of("dense", [0.5], rule=LocalUpdates(every=5))])
    assert how_soon([averaged, Curve("spardl", [run_of("spardl", [0.5])])]) is None


@pytest.mark.parametrize(
    ("better", "ends", "best"),
    [
        ("higher", {0.1: [0.5, 0.7], 0.2: [0.8, 0.6]}, 0.2),
        ("lower", {0.1: [0.5, 0.7], 0.2: [0.8, 0.6]}, 0.1),
        ("lower", {0.1: [0.5, 0.7], 0.2: [float("nan"), 0.1]}, 0.1),
        ("higher", {0.1: [0.5, 0.7], 0.2: [float("inf"), 0.1]}, 0.1),
    ],
)
def test_the_rate_with_the_best_end_over_all_seeds_counts(
    better: str, ends: dict[float, list[float]], best: float
) -> None:
    """A run that diverged is never the best."""
    curves = [
        Curve("spardl", [run_of("spardl", [end], seed=seed, lr=rate, better=better) for seed, end in enumerate(scores)])
        for rate, scores in ends.items()
    ]
    assert best_of(curves).rate == best


def test_the_table_says_which_rate_was_best() -> None:
    """And for whom a better one may lie beyond those that were tried."""
    curves = [
        Curve("dense", [run_of("dense", [0.5], lr=0.2)]),
        Curve("spardl", [run_of("spardl", [0.5], lr=0.4)]),
        Curve("topka", [run_of("topka", [0.5], lr=0.1)]),
    ]
    rates = (0.1, 0.2, 0.4)
    assert column("learning rate", curves, rates) == {"dense": "0.2", "spardl": "0.4", "topka": "0.1"}
    notes = summarise(curves, rates).notes
    assert "learning rate: of 0.1, 0.2, 0.4, the one with which a method ended best" in notes
    assert "best at the largest rate that was tried, and perhaps beyond it: spardl" in notes
    assert "best at the smallest rate that was tried, and perhaps beyond it: topka" in notes


def test_without_dense_there_is_nothing_to_compare_with() -> None:
    """The columns are left out, not left empty."""
    assert summarise([Curve("spardl", [run_of("spardl", [0.5])])]).columns == [
        "method",
        "test accuracy",
        "time",
        "sent",
        "per step",
        "density",
    ]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "runs",
    [
        [run_of("dense", [0.5]), run_of("spardl", [0.4])],
        [run_of("dense", [0.5, 0.6], sent=0.0, workers=1), run_of("spardl", [0.5, 0.6], sent=0.0, workers=1)],
        [run_of("dense", [0.5, 0.6]), run_of("spardl", [float("nan"), float("nan")], sent=10.0)],
        [run_of("dense", [float("nan")])],
        [
            run_of("dense", [1e4, 70.0], metric="perplexity", better="lower"),
            run_of("spardl", [float("inf"), 90.0], metric="perplexity", better="lower"),
        ],
    ],
    ids=["one point each", "one worker sends nothing", "diverged", "dense diverged", "perplexity"],
)
def test_whatever_came_out_is_drawn(runs: list[TrainReport]) -> None:
    """After hours of training, no result is too odd for tables, pictures and a page."""
    check_page(page_of([Curve(run.method, [run]) for run in runs]))


def test_dense_is_drawn_first_and_in_the_colour_of_text() -> None:
    """Wherever it stood in --methods."""
    curves = [Curve("spardl", [run_of("spardl", [0.5, 0.6], sent=1e4)]), Curve("dense", [run_of("dense", [0.5, 0.6])])]
    svg = as_svg(curves, OVER_BYTES)
    assert svg.index(">dense<") < svg.index(">spardl<")
    lines = re.findall(r'id="line2d_\d+">\s*<path[^>]*clip-path[^>]*stroke: (#\w+); stroke-width: 1.8', svg)
    assert lines == [INK, "#0072b2"]


def test_each_rule_of_a_method_has_a_colour_of_its_own() -> None:
    """Densities under it are kinds of lines."""
    ways = [("dense", None), ("spardl", None), ("spardl", LocalUpdates()), ("spardl", LocalUpdates())]
    curves = [Curve(str(number), [run_of(name, [0.5, 0.6], rule=rule)]) for number, (name, rule) in enumerate(ways)]
    svg = as_svg(curves, OVER_STEPS)
    lines = re.findall(r'id="line2d_\d+">\s*<path[^>]*clip-path[^>]*stroke: (#\w+); stroke-width: 1.8', svg)
    dashed = re.findall(r"stroke-dasharray: [\d., ]+; stroke-dashoffset: 0; stroke: (#\w+); stroke-width: 1.8", svg)
    assert lines == [INK, "#0072b2", "#d55e00", "#d55e00"]
    assert set(dashed) == {"#d55e00"}


# --- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Reads a page strictly: every element that is opened is closed, inside the one that it began in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id" and value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check_page(text: str) -> Page:
    """Well-formed, and nothing in it is fetched from anywhere or run."""
    page = Page(text)
    assert page.count["svg"] == 3 and page.count["script"] == 0
    assert max(page.ids.values()) == 1, page.ids.most_common(3)
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "action") and not name.startswith("on"), f"<{tag} {name}={value}>"
        if name.endswith("href"):
            assert value.startswith("#") and value[1:] in page.ids, f"<{tag} {name}={value}>"
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.startswith("#") and target[1:] in page.ids, target
    assert not re.search(r"https?://|@import|javascript:", text)
    return page


def test_a_page_shows_what_it_is_given_as_text() -> None:
    """Nothing in a name, a note or the command line becomes part of the page's own language."""
    evil = "<script>alert('&amp;')</script>\"'<svg onload=x>"
    run = run_of("dense", [0.5], recipe=evil, model=evil, data=evil, note=evil)
    curves = [Curve(f"dense {evil}", [run]), Curve(evil, [run_of("spardl", [0.5])])]
    page = check_page(page_of(curves, "--data-dir", f"/data {evil}"))
    text = "".join(page.words)
    assert text.count("<script>alert('&amp;')</script>") >= 6
    assert "spardl compare --data-dir '/data <script>" in text


@dataclass(frozen=True)
class Comparison:
    """What a command left behind."""

    done: subprocess.CompletedProcess[str]
    folder: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        return json_lines((self.folder / "runs.json").read_text())

    @property
    def page(self) -> Path:
        return self.folder / "page.html"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Dense, and SparDL at two densities, from two seeds, for two short epochs."""
    folder = tmp_path_factory.mktemp("comparison")
    what = ("--methods", "dense,spardl", "--densities", "0.05,0.01", "--seeds", "0,1")
    length = ("--workers", 2, "--epochs", 2, "--subset", 160)
    targets = ("--json", folder / "runs.json", "--page", folder / "page.html", "--pictures", folder / "pictures")
    done = spardl_forked(2, "compare", *what, *length, *targets)
    assert done.returncode == 0, done.stderr
    return Comparison(done, folder)


def test_there_is_a_record_per_run(comparison: Comparison) -> None:
    """With label, density and seed, seed by seed; the same seed begins with the same weights, another does not."""
    runs = [(record["label"], record["seed"], record["density"]) for record in comparison.records]
    labels = (("dense", 1.0), ("spardl 5 %", 0.05), ("spardl 1 %", 0.01))
    assert runs == [(label, seed, density) for seed in (0, 1) for label, density in labels]
    assert len({record["parameters_sha256"] for record in comparison.records}) == 6
    assert [record["settings"]["seed"] for record in comparison.records] == [0, 0, 0, 1, 1, 1]


def test_progress_says_which_run_it_is(comparison: Comparison) -> None:
    """Density and seed, where there are several."""
    lines = comparison.done.stderr.splitlines()
    assert len(lines) == 12
    assert lines[0].startswith("dense, seed 0 epoch 1/2: ")
    assert lines[-1].startswith("spardl 1 %, seed 1 epoch 2/2: ")


def test_three_pictures_are_drawn(comparison: Comparison) -> None:
    """In a folder that is made for them."""
    found = sorted((comparison.folder / "pictures").iterdir())
    assert [path.name for path in found] == [f"{name}.png" for name in sorted((OVER_STEPS, OVER_TIME, OVER_BYTES))]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)


def test_the_page_holds_the_table_the_settings_and_the_command(comparison: Comparison) -> None:
    """Every figure of both tables in the terminal is on it, and each epoch behind the pictures."""
    page = check_page(comparison.page.read_text())
    rows = [line.split() for line in comparison.done.stdout.splitlines() if line.startswith((" dense", " spardl"))]
    assert len(rows) == 6
    text = " ".join("\n".join(page.words).split())
    for word in (word for row in rows for word in row):
        assert word in text
    assert "spardl compare --methods dense,spardl --densities 0.05,0.01 --seeds 0,1 --workers 2" in text
    assert "dense-below 1024" in text and "subset 160" in text
    for record in comparison.records:
        assert record["parameters_sha256"][:8] in text
        for epoch in record["epochs"]:
            assert f"{100 * epoch['figures']['accuracy']:.2f} %" in text


def browse(page: Path, profile: Path, *arguments: str) -> str:
    """Open a file as a person does, in a browser without a window."""
    assert BROWSER is not None
    # A browser in a container may not sandbox itself, and this page has nothing that could run.
    how = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}")
    command = [BROWSER, *how, *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
def test_a_browser_opens_the_page_from_disk(comparison: Comparison, tmp_path: Path) -> None:
    """It finds the tables and all pictures, draws them on a phone's width, and makes no file but its own."""
    seen = Page(browse(comparison.page, tmp_path / "profile", "--dump-dom"))
    written = Page(comparison.page.read_text())
    assert seen.count == written.count
    picture = tmp_path / "phone.png"
    browse(comparison.page, tmp_path / "profile", "--window-size=400,1600", f"--screenshot={picture}")
    # A blank one takes some 5 kB.
    assert picture.stat().st_size > 40_000


# --- update rules and learning rates ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def contest(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Dense, and SparDL under three rules, each at two learning rates, on some kB of text."""
    folder = tmp_path_factory.mktemp("contest")
    lines = (f"Scene {number}. To be, or not to be: that is the question.\n" for number in range(100))
    (folder / "tinyshakespeare.txt").write_text("".join(lines), encoding="utf-8")
    what = ("--recipe", "gpt-shakespeare", "--data-dir", folder, "--workers", 2, "--batch-size", 2)
    length = ("--max-steps", 10, "--eval-steps", 2, "--warmup-steps", 2)
    ways = ("--updates", "gradients,local,diloco", "--every", 2, "--lrs", "0.001,0.01", "--density", 0.05)
    targets = ("--json", folder / "runs.json", "--page", folder / "page.html")
    done = spardl_forked(2, "compare", *what, *length, *ways, *targets, COLUMNS=200)
    assert done.returncode == 0, done.stderr
    return Comparison(done, folder)


LABELS = ["dense", "spardl 5 %, gradients", "spardl 5 %, local", "spardl 5 %, diloco"]


def test_rules_and_rates_are_records(contest: Comparison) -> None:
    """Every run, also those that were not the best, with every test on the way."""
    found = [(record["label"], record["settings"]["lr"]) for record in contest.records]
    assert found == [(label, rate) for rate in (0.001, 0.01) for label in LABELS]
    assert [record["update"] for record in contest.records[:4]] == ["gradients", "gradients", "local", "diloco"]
    for record in contest.records:
        assert [reading["step"] for reading in record["readings"]] == [2, 4, 6, 8, 10]
    assert contest.done.stderr.startswith("dense, lr 0.001 step 2/10: test loss ")


def test_the_tables_show_each_way_at_its_best(contest: Comparison) -> None:
    """The rate that ended better, and steps and time to where dense was, at its best as well."""
    ends: dict[str, dict[float, float]] = {label: {} for label in LABELS}
    for record in contest.records:
        ends[record["label"]][record["settings"]["lr"]] = record["figures"]["loss"]
    rows = [line.strip() for line in contest.done.stdout.splitlines() if line.strip().startswith(tuple(LABELS))]
    assert len(rows) == 2 * len(LABELS)
    for label, row in zip(LABELS, rows[: len(LABELS)], strict=True):
        rate, loss = min(ends[label].items(), key=lambda each: each[1])
        assert re.match(rf"{re.escape(label)} +{loss:.4f} +{rate:g} ", row), row
    assert "How soon each came to where dense was" in contest.done.stdout
    assert rows[len(LABELS)].split()[1] == "10"


def test_the_page_shows_rules_and_rates(contest: Comparison) -> None:
    page = check_page(contest.page.read_text())
    text = " ".join("\n".join(page.words).split())
    assert "How soon each came to where dense was" in text
    assert "local, every 2" in text and "diloco, every 2, apply reset, outer nesterov, outer rate 0.7" in text
