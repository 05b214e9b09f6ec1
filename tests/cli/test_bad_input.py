"""Bad input gets one sentence on standard error and exit code 2."""

import re
import socket

import pytest

from commands import RANK_VARIABLES
from spardl.cli import execute


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start in an environment in which no launcher has set a rank."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says when it refuses; nothing goes to standard output."""
    assert execute(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("spardl: ")
    assert len(captured.err.splitlines()) == 1, captured.err
    return captured.err


COMMANDS = ("train", "compare", "bench", "simulate")


@pytest.mark.parametrize("command", COMMANDS)
def test_teams_that_do_not_divide_the_workers_are_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The sentence names the teams that would work."""
    assert "choose teams from 1, 2, 3, 6" in refusal(capsys, command, "--workers", "6", "--teams", "4")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("density", ["0", "-0.1", "1.5", "nan"])
def test_a_density_outside_its_range_is_refused(capsys: pytest.CaptureFixture[str], command: str, density: str) -> None:
    """Only (0, 1] makes sense."""
    assert "outside (0, 1]" in refusal(capsys, command, f"--density={density}")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_method_is_answered_with_the_nearest_name(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """A typing error is corrected, not only refused."""
    assert "Did you mean spardl?" in refusal(capsys, command, "--method", "spradl")


@pytest.mark.parametrize("command", ["train", "compare", "bench"])
def test_a_port_in_use_is_refused_before_any_worker_starts(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The sentence names the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used" in refusal(capsys, command, "--workers", "2", "--port", str(port))


@pytest.mark.parametrize("port", ["0", "70000", "-4", "http"])
def test_a_port_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], port: str) -> None:
    """Ports go from 1 to 65535."""
    assert "port" in refusal(capsys, "bench", f"--port={port}")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "Did you mean train?"),
        (["train", "--densty", "0.01"], "Did you mean --density?"),
        (["train", "digits"], "does not know what to do with 'digits'"),
        (["simulate", "--latency", "50"], "50us"),
        (["simulate", "--bandwidth", "100mb"], "100mbit"),
        (["simulate", "--workers", "0"], "1 or more"),
        (["simulate", "--workers", "two"], "'two' is not a number of workers"),
        (["simulate", "--elements", "1.5"], "whole number of elements"),
        (["simulate", "--gather", "r", "--workers", "6", "--teams", "3"], "power of two"),
        (["simulate", "--blocks", "interlaced"], "Did you mean interleaved?"),
        (["simulate", "--teams", "some"], "neither a whole number nor auto"),
        (["simulate", "--density-warmup", "soon"], "START:STEPS"),
        (["simulate", "--density-warmup", "2:10"], "outside (0, 1]"),
        (["simulate", "--seed", "-1"], "not a seed"),
        (["simulate", "--timeout", "0"], "above 0"),
        (["simulate", "--json", "/no/such/folder/file"], "no folder"),
        (["bench", "--methods", ","], "names no method"),
        (["bench", "--repetitions", "0"], "1 or more"),
        (["bench", "--elements", "2e9"], "1 to 1,000,000,000"),
        (["bench", "--elements", ","], "names no size"),
        (["bench", "--elements", "1e6", "--model", "vgg16"], "not both"),
        (["bench", "--model", "vgg61"], "Did you mean vgg16?"),
        (["bench", "--rivals", "powersgd4"], "Did you mean powersgd-4?"),
        (["bench", "--densities", ","], "names no density"),
        (["bench", "--densities", "0.1", "--density", "0.2"], "not both"),
        (["bench", "--values", "bf16,int3"], "no values 'int3'"),
        (["bench", "--rate", "200mb"], "100mbit"),
        (["bench", "--latency", "5"], "50us"),
        (["bench", "--picture", "picture.txt"], ".png"),
        (["train", "--recipe", "digit"], "Did you mean digits?"),
        (["train", "--lr", "0"], "learning rate"),
        (["train", "--momentum", "1"], "[0, 1)"),
        (["train", "--weight-decay", "-1"], "0 or more"),
        (["train", "--epochs", "0"], "1 or more"),
        (["train", "--groups", "0"], "1 or more"),
        (["train", "--model", "resnt20"], "Did you mean resnet20?"),
        (["train", "--dataset", "cifar"], "no data set 'cifar'"),
        (["train", "--optimizer", "adam", "--momentum", "0.5"], "momentum belongs to the optimizer sgd"),
        (["train", "--milestones", "3,x"], "write it as 81,122"),
        (["train", "--schedule", "milestones"], "give milestones"),
        (["train", "--save-every", "5m"], "add --checkpoint-dir"),
        (["train", "--checkpoint-dir", "ck", "--save-every", "often"], "100, 30s, 5m or 2h"),
        (["train", "--resume"], "add --checkpoint-dir"),
        (["train", "--resume", "no/such/checkpoint"], "there is no checkpoint no/such/checkpoint"),
        (["train", "--checkpoint-dir", "no-such-folder", "--resume"], "no checkpoint in no-such-folder"),
        (["train", "--plot", "picture.txt"], ".png"),
        (["train", "--plot", "no/such/folder/run.png"], "no folder"),
        (["train", "--config", "no-such.toml"], "cannot read no-such.toml"),
    ],
)
def test_what_cannot_work_is_refused_with_a_hint(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """Each sentence says what was given and what to do instead."""
    assert sentence in refusal(capsys, *arguments)


def test_workers_that_contradict_the_launcher_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, its count of workers is the one that counts."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert "WORLD_SIZE=2" in refusal(capsys, "bench", "--workers", "3")


def test_options_are_never_guessed_from_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    """`--dens` is refused today, so that a later option cannot change its meaning."""
    assert re.search("no option --dens", refusal(capsys, "train", "--dens", "0.5"))
