"""`spardl simulate` as a user runs it: records, sweeps, pictures, topologies from files, and what is refused."""

import json

import pytest

from spardl.cli import execute

SMALL = ("simulate", "--workers", "4", "--elements", "4000", "--latency", "1ms", "--bandwidth", "10mbit")


def simulated(capfd, *arguments):
    """The records of a simulation."""
    assert execute([*SMALL, *map(str, arguments), "--json", "-"]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def refused(capfd, *arguments):
    """What is said where something cannot work."""
    assert execute([*SMALL, *map(str, arguments)]) == 2
    return capfd.readouterr().err


def test_a_record_has_time_rounds_links_and_conservation(capfd):
    (record,) = simulated(capfd, "--teams", 1)
    assert (record["rounds"], record["conserved"], record["topology"]) == (4, True, "switch")
    assert record["busiest_link"] == record["links"][0]["name"]
    assert record["links"][0]["bytes"] == record["bytes_sent_max"]


def test_a_table_names_the_busiest_link(capfd):
    assert execute([*SMALL, "--topology", "fat-tree", "--rack", "2", "--oversubscription", "8"]) == 0
    assert "rack" in capfd.readouterr().out


def test_a_sweep_runs_every_combination(capfd):
    found = simulated(capfd, "--sweep", "method=spardl,dense", "--sweep", "workers=2,4", "--teams", 1)
    assert [tuple(record["sweep"].values()) for record in found] == [
        ("spardl", "2"),
        ("spardl", "4"),
        ("dense", "2"),
        ("dense", "4"),
    ]
    assert [record["workers"] for record in found] == [2, 4, 2, 4]


def test_a_sweep_is_shown_as_a_table(capfd):
    assert execute([*SMALL, "--sweep", "density=0.01,0.1"]) == 0
    out = capfd.readouterr().out
    assert "0.01" in out and "of the fastest" in out


@pytest.mark.parametrize("extra", [(), ("--sweep", "workers=2,4"), ("--sweep", "topology=ring,switch")])
def test_pictures_are_drawn_of_runs_and_of_sweeps(tmp_path, extra):
    pytest.importorskip("matplotlib")
    target = tmp_path / "some.svg"
    assert execute([*SMALL, "--forward", "1ms", "--picture", str(target), "--json", str(tmp_path / "r"), *extra]) == 0
    assert "<svg" in target.read_text()


def test_computing_and_local_updates_are_part_of_the_time(capfd):
    (plain,) = simulated(capfd, "--forward", "10ms", "--slow-worker", "1:3x")
    assert plain["compute_s"] == pytest.approx(0.03)
    every = ("--update", "local", "--every", "3", "--forward", "10ms", "--slow-worker", "1:3x")
    (waiting,), (fitted,) = simulated(capfd, *every), simulated(capfd, *every, "--pace", "fitted")
    assert waiting["compute_s"] == pytest.approx(0.09)
    assert fitted["compute_s"] == pytest.approx(0.03)
    assert fitted["time_s"] < waiting["time_s"]


def test_slow_and_lossy_links_take_longer(capfd):
    (plain,) = simulated(capfd)
    (slow,) = simulated(capfd, "--slow-link", "worker 2 *:10x")
    (lossy,) = simulated(capfd, "--lossy-link", "* up:0.5")
    assert slow["time_s"] > plain["time_s"] and lossy["time_s"] > plain["time_s"]


TOPOLOGY = """
workers = 3

[[link]]
from = "worker *"
to = "switch"
rate = "100mbit"
back = "10mbit"
latency = "2ms"
loss = 0.001
"""


def test_a_topology_comes_from_a_file(tmp_path, capfd):
    path = tmp_path / "some.toml"
    path.write_text(TOPOLOGY)
    assert execute(["simulate", "--elements", "3000", "--topology", str(path), "--json", "-"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert (record["workers"], record["topology"]) == (3, "graph")
    assert record["time_s"] > 2 * 4e-3
    assert record["busiest_link"].startswith("switch > worker")


@pytest.mark.parametrize(
    "text,said",
    [
        ("workers = ", "not a TOML file"),
        ("a = " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        ("workers = 4", "does not connect everyone"),
        ('workers = 4\n[[link]]\nfrom = "worker 0"\nto = "worker 1"', "no way to worker 2, 3"),
        ("workers = -1", "number of workers"),
        ("workers = 1.5", "number of workers"),
        ("workers = 5", "--workers says 4"),
        ("link = 3", "[[link]]"),
        ("hosts = 3", "'hosts'"),
        ("[[link]]\nfrom = 3", "'from'"),
        ('[[link]]\nfrom = "worker 0"', "'to'"),
        ('[[link]]\nfrom = "worker 0"\nto = "a"\nspeed = "1gbit"', "'speed'"),
        ('[[link]]\nfrom = "worker 0"\nto = "a"\nrate = 5', "in quotes"),
        ('[[link]]\nfrom = "worker 0"\nto = "a"\nback = 5', "link 1"),
        ('[[link]]\nfrom = "worker 0"\nto = "a"\nrate = "5 zork"', "not a bandwidth"),
        ('[[link]]\nfrom = "worker 0"\nto = "a"\nloss = 2', "delivers nothing"),
        ('[[link]]\nfrom = "worker 0"\nto = "a"\nloss = "some"', "share of packets"),
        ('[[link]]\nfrom = "host *"\nto = "a"', "no worker is called"),
    ],
)
def test_a_file_that_is_no_topology_is_refused(tmp_path, capfd, text, said):
    path = tmp_path / "some.toml"
    path.write_text(text)
    assert said in refused(capfd, "--topology", path)


@pytest.mark.parametrize(
    "arguments,said",
    [
        (("--topology", "tree"), "fat-tree"),
        (("--topology", "none.toml"), "cannot read none.toml"),
        (("--slow-link", "worker 1 up"), "LINK:NUMBER"),
        (("--slow-link", "worker 9 up:2x"), "no link is called"),
        (("--slow-link", "* up:0"), "times slower"),
        (("--lossy-link", "* up:1"), "delivers nothing"),
        (("--slow-worker", "1"), "RANK:FACTOR"),
        (("--slow-worker", "4:2x"), "ranks are 0 to 3"),
        (("--slow-worker", "1:-2"), "times slower"),
        (("--sweep", "workers"), "NAME=VALUE"),
        (("--sweep", "json=a,b"), "cannot be swept"),
        (("--sweep", "workers=2", "--sweep", "workers=3"), "twice"),
        (("--sweep", "workers=two"), "not a number of workers"),
        (("--workers", "5000"), "4096 or fewer"),
        (("--pieces", "9999"), "give fewer"),
        (("--pieces", "2", "--update", "local"), "leave the pieces out"),
        (("--pace", "fitted"), "update"),
        (("--update", "local", "--pace", "fitted"), "every=2 or more"),
        (("--overlap", "3"), "cannot be"),
        (("--gradients", "none.pt"), "cannot read none.pt"),
        (("--picture", "some.bmp"), ".png"),
        (("--regions", "9", "--topology", "regions"), "give fewer"),
        (("--update", "local", "--delay", "1", "--adaptive"), "adaptive"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capfd, arguments, said):
    assert said in refused(capfd, *arguments)
