"""Where gradients come from: made up with a given overlap, or recorded."""

import pytest
import torch

from spardl.errors import ConfigError, DataError
from spardl.simulator.gradients import HeavyTailed, Recorded, load, save


def filled(source, step, rank, count=20_000, first=0):
    out = torch.empty(count)
    source.fill(step, rank, first, out)
    return out


def test_a_gradient_depends_on_seed_step_and_rank_and_on_nothing_else():
    source = HeavyTailed(seed=1)
    again = filled(source, 2, 3)
    filled(source, 0, 0)
    assert torch.equal(filled(source, 2, 3), again)
    others = [filled(HeavyTailed(seed=2), 2, 3), filled(source, 1, 3), filled(source, 2, 4)]
    assert all(not torch.equal(other, again) for other in others)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.9, 1.0])
def test_overlap_is_the_correlation_of_what_is_cubed(overlap):
    source = HeavyTailed(overlap=overlap)
    both = [filled(source, 0, rank).sign() * filled(source, 0, rank).abs() ** (1 / 3) for rank in (0, 1)]
    assert torch.corrcoef(torch.stack(both))[0, 1] == pytest.approx(overlap, abs=0.03)


@pytest.mark.parametrize("overlap", [-0.1, 1.1, float("nan")])
def test_an_overlap_that_cannot_be_is_refused(overlap):
    with pytest.raises(ConfigError, match="cannot be"):
        HeavyTailed(overlap=overlap)


def test_recorded_gradients_come_back_and_begin_again(tmp_path):
    values = torch.randn(2, 3, 10)
    save(tmp_path / "some.pt", values)
    source = load(tmp_path / "some.pt")
    assert torch.equal(filled(source, 1, 2, 10), values[1, 2])
    assert torch.equal(filled(source, 3, 2, 4, first=5), values[1, 2, 5:9])
    assert torch.equal(filled(source, 0, 0, 25), torch.cat([values[0, 0], values[0, 0], values[0, 0, :5]]))
    assert torch.equal(filled(source, 0, 4, 10).sort().values, values[0, 1].sort().values)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a file of torch",
        {"format": "something else"},
        {"format": "spardl gradients 1"},
        {"format": "spardl gradients 1", "gradients": torch.zeros(3)},
        {"format": "spardl gradients 1", "gradients": torch.zeros(1, 1, 0)},
        {"format": "spardl gradients 1", "gradients": torch.zeros(1, 1, 2, dtype=torch.int64)},
        {"format": "spardl gradients 1", "gradients": torch.tensor([[[1.0, float("nan")]]])},
        [1, 2],
    ],
)
def test_a_file_that_holds_no_gradients_is_refused(tmp_path, content):
    path = tmp_path / "some.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(DataError, match=r"some\.pt"):
        load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none\.pt"):
        load(tmp_path / "none.pt")


def test_recorded_gradients_of_one_worker_serve_many_without_being_copies():
    source = Recorded(torch.randn(1, 1, 10_000))
    assert not torch.equal(filled(source, 0, 0, 10_000), filled(source, 0, 1, 10_000))
