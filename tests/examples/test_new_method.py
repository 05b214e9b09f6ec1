"""The method of examples/new_method.py, from outside the package, in all the ways that docs/write-a-method.md shows."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import spardl
from clusters import Cluster
from commands import environment, json_lines
from commands import spardl as command
from conservation import check_step, heavy_tailed
from processes import on_processes
from spardl.collectives.methods import registry
from training import EXACT, all_equal, loss_of, lost_in_a_step, mlp, sgd, train, weights_of

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "new_method.py"


@pytest.fixture
def adaptive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example is registered in this process while a test runs, and not afterwards."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    spardl.register_method("adaptive", "new_method:Adaptive")
    yield
    registry.method_class.cache_clear()


def settings(**more: Any) -> spardl.SyncConfig:
    return spardl.SyncConfig(method="adaptive", density=0.05, **more)


# --- registered in this process ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("adaptive")
@pytest.mark.parametrize("workers", range(1, 10))
def test_nothing_is_lost_and_all_ranks_agree(workers: int) -> None:
    """Over chained steps, in every value format, with residuals that stay or return."""
    for values, residuals in (("fp32", "return"), ("bf16", "carry"), ("fp16", "return"), ("int8", "carry")):
        cluster = Cluster(workers, 300 + workers, settings(values=values, residuals=residuals))
        generator = torch.Generator().manual_seed(workers)
        for _ in range(5):
            check_step(cluster, heavy_tailed(workers, 300 + workers, generator))


@pytest.mark.usefixtures("adaptive")
@pytest.mark.parametrize("workers", range(2, 10))
def test_rounds_and_entries_are_within_its_price(workers: int) -> None:
    config = settings()
    cluster = Cluster(workers, 1000, config)
    cluster.step(heavy_tailed(workers, 1000, torch.Generator().manual_seed(workers)))
    about, names = registry.method_class("adaptive").about, {"P": workers, "d": config.teams_of(workers), "k": 50}
    least, most = about.rounds.range(**names)
    assert least <= max(traffic.rounds for traffic in cluster.network.traffic) <= most
    least, most = about.entries.range(**names)
    assert least <= max(cluster.entries_sent()) <= most


@pytest.mark.usefixtures("adaptive")
def test_the_threshold_finds_the_density() -> None:
    """Residuals grow for a while, since most entries wait; then about one entry in twenty reaches it."""
    cluster = Cluster(1, 5000, settings(gain=0.1))
    generator = torch.Generator().manual_seed(0)
    counts = [int(cluster.step(heavy_tailed(1, 5000, generator))[0].count_nonzero()) for _ in range(60)]
    assert 0.7 * 250 < sum(counts[-20:]) / 20 < 1.3 * 250


@pytest.mark.usefixtures("adaptive")
def test_a_step_that_is_rolled_back_teaches_the_threshold_nothing() -> None:
    """That is what a snapshot is for: a value that is not finite, on one rank, leaves all of them as they were."""
    cluster = Cluster(3, 400, settings())
    generator = torch.Generator().manual_seed(0)
    cluster.step(heavy_tailed(3, 400, generator))
    before = [method.state_dict() for method in cluster.methods], cluster.residuals()
    broken = heavy_tailed(3, 400, generator)
    broken[1][7] = torch.inf
    assert all(result.isnan().all() for result in cluster.step(broken))
    assert [method.state_dict() for method in cluster.methods] == before[0]
    assert all(torch.equal(now, then) for now, then in zip(cluster.residuals(), before[1], strict=True))


@pytest.mark.usefixtures("adaptive")
def test_its_option_is_checked_and_belongs_to_it_alone() -> None:
    with pytest.raises(spardl.ConfigError, match=r"gain=1.5 is no share of the threshold; give a number between"):
        settings(gain=1.5)
    with pytest.raises(spardl.ConfigError, match=r"^spardl has no option 'gain', which is adaptive's"):
        spardl.SyncConfig(gain=0.1)
    with pytest.raises(spardl.ConfigError, match="there is a method 'adaptive' already"):
        spardl.register_method("adaptive", "somewhere:Else")


def trained(rank: int, workers: int) -> tuple[float, float, Tensor]:
    model = DistributedDataParallel(mlp())
    sync = spardl.attach(model, optimizer=False, method="adaptive", density=0.05, gain=0.2, **EXACT)
    lost = max(lost_in_a_step(model, sync, lambda each: loss_of(each, rank, 0)) for _ in range(3))
    train(model, sgd(model), range(4))
    return lost, sync.config.options.gain, weights_of(model)


@pytest.mark.usefixtures("adaptive")
def test_a_model_trains_with_it() -> None:
    """On two processes nothing is lost, and both end with the same bits."""
    ranks = on_processes(2, trained)
    for lost, gain, _ in ranks:
        assert lost < 1e-5
        assert gain == 0.2
    assert all_equal(weights for _, _, weights in ranks)


def test_the_walk_through_shows_the_file_as_it_is() -> None:
    """Every block of the class that the page explains is in it, letter by letter."""
    page = (EXAMPLES.parent / "docs" / "write-a-method.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page.split("## Try it")[0], re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        assert block in EXAMPLE.read_text(encoding="utf-8")


@pytest.mark.slow  # the tests above import it
def test_the_example_is_a_script_of_its_own() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nothing lost: True") == 4


# --- as a package that others install ---------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a package brings the method as an entry point."""
    shutil.copy(EXAMPLE, tmp_path / "adaptive_method.py")
    about = tmp_path / "adaptive_method-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: adaptive-method\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[spardl.methods]\nadaptive = adaptive_method:Adaptive\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment(PYTHONPATH=os.pathsep.join(paths))


def test_an_entry_point_is_listed_with_its_option(installed: dict[str, str]) -> None:
    """Among the methods, and its option among the settings."""
    listed = {
        record["method"]: record for record in json_lines(command("methods", "--json", "-", env=installed).stdout)
    }
    assert listed["adaptive"]["options"] == ["gain"]
    assert listed["adaptive"]["rounds"] == "ceil(log2 P)"
    found = json_lines(command("methods", "--settings", "--json", "-", env=installed).stdout)
    (gain,) = (record for record in found if record["setting"] == "gain")
    assert (gain["default"], gain["methods"]) == ("0.05", "adaptive")


@pytest.mark.slow  # another one lists it, and a model trains with the method above
def test_an_entry_point_runs_with_its_option(installed: dict[str, str]) -> None:
    size = ("--workers", 4, "--elements", 5000, "--density", 0.02, "--steps", 3, "--json", "-")
    done = command("simulate", "--method", "adaptive", "--gain", 0.2, *size, env=installed)
    assert done.returncode == 0, done.stderr
    (report,) = json_lines(done.stdout)
    assert (report["method"], report["rounds"], report["conserved"]) == ("adaptive", 2, True)
    refused = command("simulate", "--method", "adaptive", "--gain", 2, *size, env=installed)
    assert refused.returncode == 2
    assert "gain=2.0 is no share of the threshold" in refused.stderr
