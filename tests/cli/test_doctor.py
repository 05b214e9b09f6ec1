"""`spardl doctor` says in sentences what it found, what is wrong and what to do; 1 is its answer if anything is."""

import socket
from pathlib import Path

import pytest

from commands import environment, json_lines, spardl
from spardl.cli import findings
from spardl.cli.doctor import conclusion
from spardl.cli.findings import Finding, found_address, local_findings, told_interface, torch_port

QUICK = ("doctor", "--workers", 2, "--seconds", 0.1)


def test_two_ranks_on_this_machine_exchange_and_everything_is_told_as_records(tmp_path: Path) -> None:
    """Each topic is there, nothing is wrong, and what ranks agreed on was right."""
    done = spardl(*QUICK, "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json_lines(done.stdout)
    topics = {each["topic"] for each in told}
    assert topics == {
        *("versions", "extras", "devices", "cores", "instructions", "network", "ports", "kernels"),
        *("connections", "ranks", "exchange"),
    }
    assert not [each for each in told if each["verdict"] == "bad"]
    assert any("same bits everywhere" in each["text"] for each in told)


@pytest.mark.slow  # other commands run as ranks of torchrun, too
def test_ranks_of_torchrun_are_looked_at_as_they_are(tmp_path: Path) -> None:
    """Rank 0 speaks, once, for all."""
    launcher = ("--standalone", "--nproc-per-node", 2, "-m", "spardl", "doctor", "--seconds", 0.1)
    done = spardl(*launcher, module="torch.distributed.run", env=environment(OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("What spardl finds here") == 1
    assert "2 ranks on" in done.stdout


@pytest.mark.slow  # what it finds is tested below
def test_an_interface_that_does_not_exist_is_wrong_and_ends_with_1() -> None:
    """The sentence names it and those there are; what ranks then could not do is told as well."""
    done = spardl(*QUICK, "--json", "-", env=environment(GLOO_SOCKET_IFNAME="nosuch0"))
    assert done.returncode == 1
    bad = [each for each in json_lines(done.stdout) if each["verdict"] == "bad"]
    assert bad[0]["text"] == "GLOO_SOCKET_IFNAME is nosuch0, and there is no such interface."
    assert "lo" in bad[0]["advice"]
    assert bad[-1]["topic"] == "exchange"


def test_the_interface_that_was_named_is_where_ranks_listen() -> None:
    known = {"lo": "127.0.0.1", "eth0": "10.0.0.4", "wg0": None}
    assert told_interface("eth0", known) == Finding(
        "network", "good", "GLOO_SOCKET_IFNAME is eth0, so ranks listen at 10.0.0.4."
    )
    assert told_interface("lo", known).verdict == "note"
    assert told_interface("eth1", known).verdict == "bad"


@pytest.mark.parametrize(("address", "verdict"), [("127.0.1.1", "note"), ("10.0.0.4", "good"), (None, "note")])
def test_a_name_that_leads_to_loopback_or_nowhere_comes_with_the_interface_to_set(
    monkeypatch: pytest.MonkeyPatch, address: str | None, verdict: str
) -> None:
    def resolve(*_args: object, **_named: object) -> list[tuple[object, ...]]:
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = found_address({"lo": "127.0.0.1", "eth0": "10.0.0.4"})
    assert found.verdict == verdict
    assert ("GLOO_SOCKET_IFNAME=eth0" in found.advice) == (verdict == "note")


def test_a_port_in_use_is_a_note_with_another_way() -> None:
    with socket.create_server(("", 0)) as taken:
        found = torch_port(taken.getsockname()[1])
    assert found.verdict == "note"
    assert "in use" in found.text and "--master-port" in found.advice


def test_a_missing_core_package_is_wrong_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "is_installed", lambda name: name != "numba")
    (bad,) = (each for each in findings.versions() if each.verdict == "bad")
    assert bad.text.startswith("numba is not installed")
    assert bad.advice == "install it with: pip install numba"


def test_instructions_that_kill_are_wrong_with_the_variable_that_avoids_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "claims_amx_in_vain", lambda environment: "ONEDNN_MAX_CPU_ISA" not in environment)
    (bad,) = findings.instructions({})
    assert bad.verdict == "bad"
    name, _, value = bad.advice.split()[1].partition("=")
    (good,) = findings.instructions({name: value})
    assert good.verdict == "good"


def test_a_look_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(findings, "ports", broken)
    told = list(local_findings({}))
    (bad,) = (each for each in told if each.topic == "ports")
    assert (bad.verdict, bad.text) == ("bad", "looking at it failed: OSError: no /proc here")
    assert told[-1].topic == "kernels"


def test_the_conclusion_counts() -> None:
    good, note, bad = Finding("a", "good", ""), Finding("b", "note", ""), Finding("c", "bad", "")
    assert conclusion([good, good]) == "All 2 things looked at work; nothing needs attention."
    assert conclusion([good, note]) == "All 2 things looked at work; 1 could be better."
    assert conclusion([good, note, bad]) == "1 of 3 things looked at does not work."
