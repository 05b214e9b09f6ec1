"""examples/fsdp.py: a model in parts, sparse between replicas, with checkpoints of torch.distributed.checkpoint."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

# What the script imports is imported once, before processes part.
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

import spardl.integrations.attach  # noqa: F401
from commands import environment
from commands import spardl as command
from processes import on_processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp.py"


def read(text: str) -> tuple[float, str, float]:
    """Validation loss, a sum of all shared weights, and the share of a part's bytes that a step sends."""
    said = re.fullmatch(
        r"step \d+: validation loss (\S+), weights (\S+)\n(\d+) bytes per step for the (\d+) weights of this part\n",
        text,
    )
    assert said is not None, text
    loss, weights, sent, elements = said.groups()
    return float(loss), weights, float(sent) / (4 * float(elements))


def _run(rank: int, workers: int, options: list[str]) -> str:
    """The script itself, in a process that has a process group already: starting torch anew takes most of the time."""
    out = io.StringIO()
    here = [mock.patch(f"torch.distributed.{name}_process_group") for name in ("init", "destroy")]
    here.append(mock.patch.object(sys, "argv", [str(EXAMPLE), *options]))
    with contextlib.redirect_stdout(out), contextlib.ExitStack() as stack:
        for each in here:
            stack.enter_context(each)
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return out.getvalue()


def test_it_learns_and_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    options = ["--steps", "12", "--folder", str(tmp_path / "checkpoint")]
    loss, weights, share = read(on_processes(4, _run, options)[0])
    assert loss < 4.5  # a guess among 120 characters has 4.8
    assert share < 0.05
    on_processes(4, _run, [*options, "--stop-after", "5"])
    assert read(on_processes(4, _run, [*options, "--resume"])[0])[1] == weights


def test_its_command_runs(tmp_path: Path) -> None:
    launcher = ("--standalone", "--nproc-per-node", 4, EXAMPLE, "--steps", 2, "--folder", tmp_path / "checkpoint")
    done = command(*launcher, module="torch.distributed.run", cwd=tmp_path, env=environment(OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stderr
    read(done.stdout)
