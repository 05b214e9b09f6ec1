"""The programs in benchmarks/: what they are run with, and the page that is made of their records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spardl.cli.bench import chosen_match, chosen_vectors
from spardl.cli.commands import parse
from spardl.simulator.gradients import HeavyTailed

pytest.importorskip("benchmarks.suite")  # not part of the source distribution

from benchmarks import choice, endtoend, kernels, prediction, report, suite, targets

ROOT = Path(report.__file__).parent.parent


# --- what is run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", suite.JOBS, ids=lambda job: job.name)
def test_each_command_is_one_that_the_command_line_understands(job: suite.Job, tmp_path: Path) -> None:
    """Options of `spardl bench` in the suite exist, and name what exists."""
    command = job.command(tmp_path)
    if "spardl" in command:
        options = parse(command[command.index("spardl") + 1 :])
        assert chosen_match(options).configs and chosen_vectors(options)
        assert options.rate == job.rate
    assert command[-2:] == ["--json", str(tmp_path / f"{job.name}.json")]


def test_what_all_benchmarks_are_expected_to_take_fits_into_half_an_hour() -> None:
    """Nothing is timed here: each says what it takes on a quiet machine, and a new one has to find its place."""
    assert sum(job.expected_s for job in suite.JOBS) < 30 * 60


def test_what_needs_root_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names the benchmarks that do without."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"needs root; use sudo, or --only with latency, kernels, memory"):
        suite.check(suite.chosen("sizes"))
    suite.check(suite.chosen("kernels"))


def test_a_benchmark_that_fails_is_named_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = suite.Job("good", "one that works", ("python", "-c", "pass"))
    bad = suite.Job("bad", "one that does not", ("python", "-c", "raise SystemExit(3)"))
    assert suite.run_all([bad, good], tmp_path) == 1
    assert "Failed: bad" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "runs.json").read_text())) == ["good"]


def test_a_benchmark_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LONGEST_S", 0.5)
    _, code = suite.run(suite.Job("slow", "", ("python", "-c", "import time; time.sleep(60)")), tmp_path)
    assert code == 1
    assert "not done after" in (tmp_path / "slow.txt").read_text()


# --- the page -------------------------------------------------------------------------------------------------------


def sync_record(method: str, median: float, **changes: Any) -> dict[str, Any]:
    facts = {"model": "vgg16", "elements": 14_728_266, "workers": 4, "rate": 25e6, "latency_s": 0.0, "values": "bf16"}
    times = {"median_s": median, "quartiles_s": [0.9 * median, 1.1 * median], "limit_s": 0.02, "times_limit": 1.0}
    costs = {"rounds": 3, "bytes_sent": 1000, "density": 0.01, "speedup_vs_dense": 4.0 / median}
    whole = {"density": 1.0, "values": "fp32"} if method in ("dense", "fp16", "powersgd-4") else {}
    return {"method": method, **facts, **times, **costs, **whole, "seconds_selecting": 0.5 * median, **changes}


def sync_records(spardl: float = 0.05) -> list[dict[str, Any]]:
    medians = {"dense": 4.0, "topka": 0.2, "spardl": spardl, "fp16": 2.0, "powersgd-4": 0.3, "handwritten-topk": 0.9}
    return [sync_record(method, median) for method, median in medians.items()]


def results(**records: list[dict[str, Any]]) -> targets.Results:
    named = {name.replace("_", "-"): found for name, found in records.items()}
    runs = {name: {"title": name, "command": f"run {name}", "seconds": 60.0, "day": "2026-01-01"} for name in named}
    machine = {"cores": 2, "processor": "P", "memory_bytes": 2**34, "system": "S", "python": "3", "torch": "2"}
    return targets.Results(runs, {**machine, "numpy": "2"}, named)


def verdicts(found: targets.Results) -> dict[str, targets.Target]:
    return {target.key: target for target in targets.targets(found)}


def test_targets_are_met_or_missed_by_the_figures() -> None:
    """80 times faster than dense where 40 are wanted; where it is 20, that is a miss."""
    met = verdicts(results(sync_4_200mbit=sync_records()))
    assert met["sync-4-200mbit/dense"].measured == "80.00x"
    assert met["sync-4-200mbit/dense"].limit == "200.0x"
    for key in ("dense", "ours", "handwritten", "powersgd-4", "fp16"):
        assert met[f"sync-4-200mbit/{key}"].met, key
    missed = verdicts(results(sync_4_200mbit=sync_records(spardl=0.25)))
    assert [missed[f"sync-4-200mbit/{key}"].met for key in ("dense", "ours", "handwritten", "powersgd-4", "fp16")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert met["sync-4-1gbit/dense"].measured is None


def test_a_miss_stands_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.REASONS, "sync-4-200mbit/dense", "the moon was full")
    page = report.Page(results(sync_4_200mbit=sync_records(spardl=0.25)), Path("."), Path("."))
    row = next(line for line in page.slot_targets().splitlines() if "40x" in line and "beside all others" in line)
    assert "**missed**" in row and "the moon was full" in row


def test_other_targets_are_read_from_their_benchmarks() -> None:
    kernel = {"what": kernels.LARGEST, "median_s": 0.04, "limit_s": 0.02, "times_add": 4.0}
    ways = {targets.OURS: [0.0002, 0.0003], targets.PLAIN: [0.0001, 0.00025]}
    steps = {"elements": 10, "workers": 4, "rate": 25e6, "limit_s": 0.5}
    found = verdicts(
        results(
            kernels=[kernel, {**kernel, "what": kernels.ABOVE, "times_add": 3.0}],
            latency=[{"bytes": 8, "seconds": {"2": ways, "8": ways}}],
            train_vgg16=[
                {"way": endtoend.DENSE, "median_s": 5.0, **steps},
                {"way": "fp16 hook", "median_s": 0.9, **steps},
                {"way": endtoend.OURS, "median_s": 1.0, **steps},
            ],
            memory=[{"peak_bytes": 2**34, "before_bytes": 2**30, "limit_bytes": 2**30, "allowed_bytes": 24 << 30}] * 2,
        )
    )
    assert {key: target.met for key, target in found.items() if target.measured is not None} == {
        f"kernels/{kernels.LARGEST}": True,
        f"kernels/{kernels.ABOVE}": False,
        "latency/8": True,
        "latency/2": True,
        "train/dense": True,
        "train/fp16 hook": False,
        "duration": True,
        "memory": False,
    }


def test_whoever_beats_spardl_is_named() -> None:
    """At the same density or without one, never at another."""
    records = [*sync_records(spardl=0.25), sync_record("topka", 0.01, density=0.001)]
    ((name, where, _, faster),) = report.winners(results(sizes=records))
    assert (name, faster) == ("sizes", "topka 1.25x")
    assert "14,728,266 elements, 1 %, 4 hosts, 200 Mbit/s" in where


def test_the_page_is_made_without_measuring(tmp_path: Path) -> None:
    """Tables, pictures and commands of what has run; of the rest, how to run it."""
    found = results(sync_4_200mbit=sync_records(), densities=[*sync_records(), sync_record("spardl", 0.1, density=0.1)])
    text = report.Page(found, tmp_path, tmp_path).filled((ROOT / report.TEMPLATE).read_text())
    assert "{{" not in text
    assert "| spardl | **50.0 ms** |" in text
    assert "| spardl, 10 % | 100 ms |" in text
    assert "run sync-4-200mbit" in text
    assert "Not measured yet: `python -m benchmarks.suite --only kernels`" in text
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["parts-sync-4-200mbit.png", "time-over-density.png"]
    for name in pictures:
        assert f"(pictures/{name})" in text


def test_every_slot_and_every_job_is_on_the_page() -> None:
    """What is measured is shown, with its command."""
    template = (ROOT / report.TEMPLATE).read_text()
    for match in report.SLOT.finditer(template):
        assert hasattr(report.Page, f"slot_{match[1]}"), match[0]
    for job in suite.JOBS:
        assert job.name in template, job.name


# --- programs -------------------------------------------------------------------------------------------------------


def test_kernels_are_measured_through_the_memory_of_a_rank() -> None:
    """Every way on a small vector: residuals stay finite, and each way is timed as often."""
    options = type("Options", (), {"density": 0.01})()
    found = kernels.measured(kernels.Selection(20_000, 0.01), repetitions=2)
    records = kernels.selection_records(found, 20_000, options)
    assert {record["what"]: record["repetitions"] for record in records} == dict.fromkeys(kernels.Selection.names, 2)
    coded = kernels.coding_records(kernels.measured(kernels.Coding(20_000, 0.01, "bf16"), 2), 20_000, options)
    assert all(record["entries_per_s"] > 0 for record in coded)


def test_a_quick_look_keeps_the_settings(tmp_path: Path) -> None:
    """The same hosts and lines on small gradients."""
    for job in suite.JOBS:
        little = suite.quick(job)
        assert replace(little, program=job.program, expected_s=job.expected_s) == job
        assert "vgg16" not in little.program


# --- prediction -----------------------------------------------------------------------------------------------------


def cases(predicted: dict[str, float]) -> list[prediction.Case]:
    """Three methods on four hosts, of which topka and gtopk cannot be told apart by measuring."""
    measured = {"spardl": 1.0, "topka": 2.0, "gtopk": 2.05}
    return [prediction.Case(4, "10mbit", name, measured[name], predicted[name]) for name in measured]


def test_a_ranking_counts_pairs_of_methods_that_measurably_differ() -> None:
    """Which of two that take as long is predicted to be faster does not matter."""
    assert counts(cases({"spardl": 1.1, "topka": 2.3, "gtopk": 1.9})) == (2, 0, 1)
    assert counts(cases({"spardl": 2.1, "topka": 2.0, "gtopk": 2.2})) == (1, 1, 1)


def counts(given: list[prediction.Case]) -> tuple[int, ...]:
    """Pairs that are ranked alike, swapped pairs, and ties."""
    return tuple(map(len, prediction.ranked(given)))


def test_methods_that_differ_by_less_than_they_scatter_are_ties() -> None:
    quick = prediction.Case(2, "10mbit", "spardl", 1.0, 2.0, upper_s=1.3)
    slow = prediction.Case(2, "10mbit", "topka", 1.2, 1.0, upper_s=1.25)
    assert counts([quick, slow]) == (0, 0, 1)
    assert counts([replace(quick, upper_s=1.1), slow]) == (0, 1, 0)


def test_swapped_pairs_are_shown_with_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    quick = prediction.Case(2, "10mbit", "spardl", 1.0, 2.0, upper_s=1.1)
    prediction.show([quick, prediction.Case(2, "10mbit", "topka", 1.2, 1.0, upper_s=1.25)])
    assert "spardl: 1.00 s to 1.10 s" in capsys.readouterr().out


# --- choice ---------------------------------------------------------------------------------------------------------


def record(planned_as: str, halves: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "planned_as": planned_as,
        "seconds": {name: sum(pair) / 2 for name, pair in halves.items()},
        "halves": halves,
    }


def test_halves_are_of_every_other_turn() -> None:
    step = choice.STEPS
    assert choice.halves([1.0] * step + [3.0] * step + [1.0] * step + [3.0] * step) == [1.0, 3.0]
    assert choice.halves([70.0]) == [70.0, 70.0]


def test_luck_of_a_candidate_is_not_held_against_the_pick() -> None:
    """Three ways of the same speed, each with a good half: no pick of these is worse than the best."""
    even = {"dense": [9.0, 9.0], "topka": [1.0, 1.2], "gtopk": [1.2, 1.0], "auto": [0.1, 0.1]}
    assert choice.of_the_best(record("topka", even)) <= 1.0
    assert choice.of_the_best(record("dense", even)) > 7
    assert choice.noise(record("topka", even)) == pytest.approx(0.2)


def test_a_pick_that_is_slower_in_both_halves_is_so_much_slower() -> None:
    slower = {"dense": [9.0, 9.0], "topka": [1.2, 1.2], "gtopk": [1.0, 1.0]}
    assert choice.of_the_best(record("topka", slower)) == pytest.approx(1.2)


def test_an_error_is_a_share_of_what_was_measured() -> None:
    assert [round(case.error, 3) for case in cases({"spardl": 1.1, "topka": 1.0, "gtopk": 2.05})] == [0.1, 0.5, 0.0]


def test_what_was_measured_before_is_shown_and_drawn_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "some.json").write_text(json.dumps([vars(case) for case in cases(dict.fromkeys(NAMES, 2.0))]))
    picture = tmp_path / "some.svg"
    monkeypatch.setattr("sys.argv", ["prediction", "--read", f"{tmp_path}/some.json", "--picture", str(picture)])
    prediction.main()
    assert "median error 2.4 %" in capsys.readouterr().out
    assert picture.exists()


NAMES = ("spardl", "topka", "gtopk")


def test_the_line_of_the_laboratory_is_what_the_formula_says_less_its_burst() -> None:
    """Two hosts send each other all entries once: the same bytes as the simulated frames have, over 1448 of 1547."""
    seconds = prediction.line_seconds("topka", 2, "100mbit")
    bytes_sent = 24.2 / 8 * 10_000
    assert seconds == pytest.approx(bytes_sent * 1547 / 1448 / 12.5e6 - 6250 / 12.5e6, rel=0.02)


def test_predicted_gradients_are_those_of_the_bench(monkeypatch) -> None:
    """With normal numbers, of which the bench's are made, Ok-Topk's reused thresholds let far more than k entries pass:
    the simulator's heavy-tailed ones would say half of what four real ranks send, 129 kB a step at 1 % of a million."""
    monkeypatch.setattr(prediction, "ELEMENTS", 100_000)
    seconds = prediction.line_seconds("oktopk", 4, "10mbit")
    monkeypatch.setattr(prediction, "Normal", HeavyTailed)
    assert seconds > 1.5 * prediction.line_seconds("oktopk", 4, "10mbit")
