"""What each command writes for machines."""

from pathlib import Path

import pytest

from commands import environment, json_lines, spardl, start
from forked import spardl_forked
from spardl.cli import execute
from spardl.collectives.methods.registry import METHODS
from spardl.train.recipes import RECIPES

BENCH_FIGURES = {
    "method",
    "workers",
    "elements",
    "density",
    "median_s",
    "rounds",
    "bytes_sent",
    "bits_per_entry",
    "speedup_vs_dense",
    "limit_s",
    "times_limit",
}


def test_methods_lists_every_method_with_its_cost(capfd: pytest.CaptureFixture[str]) -> None:
    """Name, paper, rounds and entries, one record each."""
    assert execute(["methods", "--json", "-"]) == 0
    found = json_lines(capfd.readouterr().out)
    assert [record["method"] for record in found] == list(METHODS)
    assert all(record.keys() >= {"paper", "rounds", "entries"} for record in found)


def test_methods_are_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there is a table, and nothing on standard error."""
    assert execute(["methods"]) == 0
    captured = capsys.readouterr()
    assert "ICDE 2024" in captured.out
    assert captured.err == ""


def test_simulate_reports_time_rounds_and_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    """14 workers in 7 teams: the record holds every figure that the options promise, and nothing was lost."""
    network = ["--latency", "50us", "--bandwidth", "1gbit"]
    assert execute(["simulate", "--workers", "14", "--teams", "7", "--elements", "20000", *network, "--json", "-"]) == 0
    (record,) = json_lines(capfd.readouterr().out)
    assert record["method"] == "spardl"
    assert (record["workers"], record["teams"], record["rounds"]) == (14, 7, 5)
    assert record["conserved"] is True
    assert record["time_s"] > 5 * 50e-6
    assert record.keys() >= {"bytes_sent_max", "bits_per_entry", "nnz"}


def test_simulate_obeys_every_synchronisation_option(capfd: pytest.CaptureFixture[str]) -> None:
    """The options reach the programs: raw indices and fp32 values take 64 bits and more per entry."""
    formats = ["--values", "fp32", "--indices", "raw", "--blocks", "contiguous", "--residuals", "return"]
    rest = ["--selection", "eager", "--gather", "b", "--density-warmup", "0.5:2", "--steps", "3", "--seed", "7"]
    assert execute(["simulate", "--workers", "6", "--elements", "10000", *formats, *rest, "--json", "-"]) == 0
    (record,) = json_lines(capfd.readouterr().out)
    assert record["bits_per_entry"] >= 64
    assert record["density"] == pytest.approx(0.01)
    assert record["conserved"] is True


@pytest.mark.slow  # test_bench.py looks at records of a sweep
def test_bench_writes_one_record_per_method() -> None:
    """Dense and sparse side by side, with the ratio between them, and nothing else on standard output."""
    done = spardl(
        "bench", "--workers", 2, "--elements", 20_000, "--repetitions", 3, "--methods", "dense,spardl", "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    dense, sparse = json_lines(done.stdout)
    assert dense.keys() >= BENCH_FIGURES
    assert (dense["method"], sparse["method"]) == ("dense", "spardl")
    assert dense["speedup_vs_dense"] == 1.0
    assert sparse["speedup_vs_dense"] == pytest.approx(dense["median_s"] / sparse["median_s"])
    assert sparse["bytes_sent"] < dense["bytes_sent"] / 50
    assert done.stderr == ""


@pytest.mark.slow  # examples/ddp.py runs under torchrun
def test_bench_runs_as_ranks_of_torchrun() -> None:
    """Under another launcher each process is one rank, and rank 0 alone writes."""
    command = ["bench", "--elements", 5000, "--repetitions", 2, "--methods", "spardl", "--json", "-"]
    with start("--nproc-per-node=2", "--standalone", "-m", "spardl", *command, module="torch.distributed.run") as run:
        out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    (record,) = json_lines(out)
    assert (record["workers"], record["method"], record["speedup_vs_dense"]) == (2, "spardl", None)


def test_train_reports_accuracy_and_traffic(tmp_path: Path) -> None:
    """One line per epoch and test while it works, a table at the end, the record in a file, a log and a picture."""
    target, log, picture = tmp_path / "run.json", tmp_path / "log", tmp_path / "run.png"
    places = ("--json", target, "--log-dir", log, "--plot", picture)
    what = ("--workers", 2, "--epochs", 2, "--density", 0.05, "--eval-steps", 30)
    done = spardl_forked(2, "train", *what, *places, COLUMNS=120)
    assert done.returncode == 0, done.stderr
    said = ["spardl step 30/88", "spardl epoch 1/2", "spardl step 60/88", "spardl epoch 2/2"]
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == said
    for word in ("test accuracy", "computing", "selecting", "waiting", "transferring", "samples per second"):
        assert word in done.stdout
    (record,) = json_lines(target.read_text())
    accuracy = record["figures"][record["metric"]]
    assert 0 <= accuracy <= 1
    assert (accuracy * 359) == pytest.approx(round(accuracy * 359))
    assert record["achieved_density"] == pytest.approx(0.05, rel=0.05)
    assert record["bytes_per_step"] > 0
    assert len(record["epochs"]) == 2
    lines = json_lines((log / "log.jsonl").read_text())
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(10, record["steps"] + 1, 10))
    assert [line["figures"] for line in lines if line["kind"] == "epoch"] == [
        epoch["figures"] for epoch in record["epochs"]
    ]
    tests = [line["figures"] for line in lines if line["kind"] == "test"]
    assert tests == [each["figures"] for each in record["readings"] if each["step"] in (30, 60)]
    assert list(log.glob("events.out.tfevents.*"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # test_compare.py has a shorter one
def test_compare_puts_methods_side_by_side() -> None:
    """One table with metric, time to the dense run's end and bytes of each method on the same recipe."""
    done = spardl("compare", "--workers", 2, "--epochs", 1, "--methods", "dense,spardl", env=environment(COLUMNS=140))
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert "dense" in rows and "spardl" in rows
    assert "x fewer bytes" in done.stdout
    assert "time to dense's end" in done.stdout


def test_recipes_are_listed_with_all_that_they_set(capfd: pytest.CaptureFixture[str]) -> None:
    """A table for people; for machines one record each, with its settings."""
    assert execute(["recipes"]) == 0
    assert "vgg16-cifar10" in capfd.readouterr().out
    assert execute(["recipes", "--json", "-"]) == 0
    found = {record["name"]: record for record in json_lines(capfd.readouterr().out)}
    assert list(found) == list(RECIPES)
    assert found["vgg16-cifar10"]["settings"]["milestones"] == [81, 122, 155]
    assert found["vgg16-cifar10"]["paper"] == "SparDL"
