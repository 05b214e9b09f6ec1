"""Threads share blocks, each block with one of them."""

import numpy as np
import pytest
import torch

from spardl.kernels.api import Bools
from spardl.kernels.cpu.crew import Crew


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("wanted", [[], [0], [3], [0, 1, 4], [0, 1, 2, 3, 4]])
def test_every_wanted_block_is_done_once(size: int, wanted: list[int]) -> None:
    blocks = np.zeros(5, np.bool_)
    blocks[wanted] = True
    done = np.zeros(5, np.int64)

    def job(some: Bools) -> bool:
        done[some] += 1
        return True

    assert Crew(size).share(job, blocks)
    assert np.array_equal(done, blocks)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_one_bad_block_is_bad_for_all(size: int, bad: int) -> None:
    assert not Crew(size).share(lambda some: not some[bad], np.ones(5, np.bool_))


def test_a_crew_has_a_thread_per_core_that_torch_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one at least; where a rank has no core to itself, others work while it waits."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    sizes = {12.0: 5, 4.5: 4, 1.0: 1, 0.4: 1}
    assert {cores: Crew.for_cores(cores).size for cores in sizes} == sizes
    assert [cores for cores in sizes if Crew.for_cores(cores).crowded] == [0.4]
