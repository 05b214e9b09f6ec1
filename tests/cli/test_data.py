"""`spardl data`: what there is, and how it gets here."""

import gzip
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from commands import json_lines
from spardl.cli import execute
from spardl.train.data.catalogue import CATALOGUE
from train.data.servers import Server, serving


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a tiny MNIST, which the catalogue takes for the real one."""
    with serving() as server:
        downloads = []
        for download in CATALOGUE["mnist"].downloads:
            sizes = (2, 28, 28) if "images" in download.gives else (2,)
            content = bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes)
            packed = gzip.compress(content + bytes(2 * 28 * 28 if len(sizes) > 1 else 2))
            server.files[f"/{download.remote_name}"] = packed
            checksum = f"md5:{hashlib.md5(packed).hexdigest()}"
            downloads.append(replace(download, size=len(packed), checksum=checksum))
        monkeypatch.setitem(CATALOGUE, "mnist", replace(CATALOGUE["mnist"], downloads=tuple(downloads)))
        yield server


@pytest.mark.parametrize("arguments", [("data",), ("data", "list")])
def test_the_list_shows_every_data_set(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    """With what it needs and how to get that."""
    assert execute(arguments) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in CATALOGUE)
    assert "spardl data fetch NAME" in shown and "170 MB" in shown


def test_the_list_has_a_record_per_data_set(capfd: pytest.CaptureFixture[str]) -> None:
    """For machines: names, addresses and sizes."""
    assert execute(("data", "list", "--json", "-")) == 0
    records = {record["data"]: record for record in json_lines(capfd.readouterr().out)}
    assert list(records) == list(CATALOGUE)
    assert records["cifar10"]["bytes"] == 170_052_171
    assert records["digits"]["urls"] == [] and records["ml-latest-small"]["bytes"] is None


def test_what_was_fetched_can_be_loaded(mirror: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Progress is told on standard error; the loader finds the files in the same directory."""
    assert execute(("data", "fetch", "mnist", "--data-dir", str(tmp_path), "--url", mirror.url)) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fetching train-images-idx3-ubyte.gz" in captured.err and "100 %" in captured.err
    assert captured.err.endswith(f"mnist is in {tmp_path / 'mnist'}.\n")
    from spardl.train.data import load_data

    assert len(load_data("mnist", tmp_path).train) == 2


def test_a_failed_download_is_one_sentence_and_exit_code_one(
    mirror: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What went wrong was not the input."""
    mirror.files.clear()
    assert execute(("data", "fetch", "mnist", "--data-dir", str(tmp_path), "--url", mirror.url)) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        f"spardl: {mirror.url}train-images-idx3-ubyte.gz answered 404 Not Found; the file may have moved:"
        " --url names another address."
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fetch", "mnist"), "--data-dir"),
        (("fetch",), "NAME"),
        (("fetch", "mnits", "--data-dir", "x"), "Did you mean mnist?"),
        (("fetch", "digits", "--data-dir", "x"), "comes with scikit-learn"),
        (("fetch", "mnist", "--data-dir", "x", "--ulr", "y"), "Did you mean --url?"),
        (("list", "cifar10"), "does not know what to do with 'cifar10'"),
        (("lst",), "invalid choice: 'lst'"),
    ],
)
def test_what_cannot_work_is_refused_with_a_hint(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    """One sentence on standard error, exit code 2."""
    assert execute(("data", *arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert captured.err.startswith("spardl: ") and sentence in captured.err
