"""Ranks that share a machine share its cores."""

import json
import os
from pathlib import Path

import pytest

from spardl import machine
from spardl.machine import claims_amx_in_vain, cores_each, cores_per_rank


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the others have: what each rank has at least counts for all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    other, small = json.dumps(["another machine", 12]), json.dumps(["small", 1])
    assert cores_each(lambda mine: [mine, other, mine, small]) == [6, 12, 6, 1]
    assert cores_per_rank(lambda mine: [mine, other, mine, small]) == 1
    assert cores_per_rank(lambda mine: [mine, other, other]) == 6
    assert cores_per_rank(lambda mine: [mine, mine, mine, other]) == 4
    assert [cores_per_rank(lambda mine, n=n: [mine] * n) for n in (1, 12, 24)] == [12, 1, 0.5]


def test_where_the_kernel_has_no_boot_id_the_name_of_the_machine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of Linux, where the number of cores is all that there is to know, too."""
    monkeypatch.setattr("pathlib.Path.read_text", _no_such_file)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    shown: list[str] = []
    assert cores_per_rank(lambda mine: shown.append(mine) or [mine, mine]) == 3  # type: ignore[func-returns-value]
    assert json.loads(shown[0]) == [os.uname().nodename, 6]


def _no_such_file(*_: object) -> str:
    raise FileNotFoundError


@pytest.mark.parametrize(
    ("announced", "multiply", "in_vain"),
    [
        ("avx512f amx_bf16", "import os; os.kill(os.getpid(), 4)", True),
        ("avx512f amx_bf16", "pass", False),
        ("avx2", "import os; os.kill(os.getpid(), 4)", False),
    ],
)
def test_an_instruction_that_is_only_announced_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, announced: str, multiply: str, in_vain: bool
) -> None:
    """By a process that uses it and is killed; none is started where it is not announced."""
    (tmp_path / "cpuinfo").write_text(f"flags : {announced}")
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "_MULTIPLY", multiply)
    assert claims_amx_in_vain() is in_vain
