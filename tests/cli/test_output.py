"""Records are for machines, tables for people."""

import json
import os
from pathlib import Path

import pytest

from spardl.cli.output import as_bytes, as_rate, as_ratio, as_seconds, records, to_json
from spardl.errors import ConfigError


def test_records_are_one_json_object_per_line(tmp_path: Path) -> None:
    """Any tool that reads JSON lines reads our files."""
    target = tmp_path / "out.json"
    with records(str(target)) as write:
        write({"method": "dense"})
        write({"method": "spardl"})
    assert [json.loads(line)["method"] for line in target.read_text().splitlines()] == ["dense", "spardl"]


def test_numbers_that_json_cannot_say_become_null() -> None:
    """A diverged run still gives a record that every parser accepts."""
    assert json.loads(to_json({"loss": float("nan"), "nested": {"list": [1.0, float("inf")]}})) == {
        "loss": None,
        "nested": {"list": [1.0, None]},
    }


def test_only_records_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """What a library prints while records go to standard output, even natively, lands on standard error."""
    with records("-") as write:
        os.write(1, b"a library talks\n")
        write({"rounds": 3})
    captured = capfd.readouterr()
    assert captured.out == '{"rounds": 3}\n'
    assert "a library talks" in captured.err


@pytest.mark.parametrize("name", [".", "no/such/folder/out.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    """Nobody trains for an hour to lose the result."""
    with pytest.raises(ConfigError, match="cannot write"), records(str(tmp_path / name)):
        pytest.fail("the work began")


def test_a_failed_run_leaves_the_records_that_it_made(tmp_path: Path) -> None:
    """Hours of finished runs are not lost with the one that failed; without any, an old file stays as it was."""
    target = tmp_path / "out.json"
    target.write_text("old\n")
    with pytest.raises(RuntimeError), records(str(target)):
        raise RuntimeError("the first run failed")
    assert target.read_text() == "old\n"
    with pytest.raises(RuntimeError), records(str(target)) as write:
        write({"run": 1})
        raise RuntimeError("the second run failed")
    assert target.read_text() == '{"run": 1}\n'


def test_quantities_have_units_and_three_digits() -> None:
    """A person reads 12.3 kB, 4.20 ms, 1 Gbit/s and 12.3x faster."""
    assert [as_bytes(n) for n in (12, 12_345, 6_000_000, 908e3)] == ["12 B", "12.3 kB", "6 MB", "908 kB"]
    assert [as_seconds(t) for t in (0.0042, 12.34, 123.4, 5e-6)] == ["4.20 ms", "12.3 s", "123 s", "5.00 us"]
    assert as_seconds(0.0005, 0.0021) == "0.50-2.10 ms"
    assert [as_rate(r) for r in (1.25e8, 1.25e7, float("inf"))] == ["1 Gbit/s", "100 Mbit/s", "unlimited"]
    assert [as_ratio(r) for r in (12.34, 0.5)] == ["12.3x faster", "2.00x slower"]
