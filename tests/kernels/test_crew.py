"""Threads share blocks, each block with one of them; ranks that share a machine share its cores."""

import json
import os

import numpy as np
import pytest
import torch

from spardl.kernels import crew
from spardl.kernels.crew import Crew, cores_each, crew_of_rank


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("wanted", [[], [0], [3], [0, 1, 4], [0, 1, 2, 3, 4]])
def test_every_wanted_block_is_done_once(size: int, wanted: list[int]) -> None:
    blocks = np.zeros(5, np.bool_)
    blocks[wanted] = True
    done = np.zeros(5, np.int64)

    def job(some: crew.Bools) -> bool:
        done[some] += 1
        return True

    assert Crew(size).share(job, blocks)
    assert np.array_equal(done, blocks)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_one_bad_block_is_bad_for_all(size: int, bad: int) -> None:
    assert not Crew(size).share(lambda some: not some[bad], np.ones(5, np.bool_))


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    other = json.dumps(["another machine", 12])
    assert crew_of_rank(lambda mine: [mine, other, other]).size == 5, "torch may use no more"
    assert crew_of_rank(lambda mine: [mine, mine, mine, other]).size == 4
    assert crew_of_rank(lambda mine: [mine] * 30).size == 1
    assert [crew_of_rank(lambda mine, n=n: [mine] * n).crowded for n in (1, 12, 13)] == [False, False, True]
    assert cores_each(lambda mine: [mine, other, mine, json.dumps(["small", 1])]) == [6, 12, 6, 1]
