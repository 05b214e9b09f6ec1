"""The ranks of a run share a data set fairly and reproducibly."""

import os
import signal

import pytest
import torch

from spardl.errors import ConfigError, DataError
from spardl.train.source import IGNORED, Examples, Source, Stream, Windows, batches
from spardl.train.subset import part_of


def numbered(count: int) -> Examples:
    """Examples that are their own number, so that a test sees which one it got."""
    return Examples(torch.arange(count))


def epoch_of(source: Source, workers: int, batch_size: int, *, seed: int = 0, epoch: int = 0) -> list[list[list[int]]]:
    """Numbers by rank, step and position."""
    order = source.order(workers, batch_size, seed=seed, epoch=epoch)
    return [
        [batch[0].tolist() for batch in batches(source, order[:, rank], seeds=(seed, epoch, rank))]
        for rank in range(workers)
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_no_example_is_used_twice_in_an_epoch(workers: int) -> None:
    """Ranks draw from one shuffling, each its own part of every step."""
    drawn = [label for rank in epoch_of(numbered(103), workers, 4) for batch in rank for label in batch]
    assert len(drawn) == len(set(drawn)) == 103 // (4 * workers) * 4 * workers


def test_every_rank_has_equally_many_full_batches() -> None:
    """A rank with one batch more would wait for the others forever."""
    ranks = epoch_of(numbered(50), 3, 4)
    assert [[len(batch) for batch in rank] for rank in ranks] == [[4, 4, 4, 4]] * 3


def test_epochs_and_seeds_shuffle_differently_and_reproducibly() -> None:
    """The order depends on seed and epoch, and on nothing else."""
    data = numbered(40)
    assert epoch_of(data, 2, 5, seed=1, epoch=2) == epoch_of(data, 2, 5, seed=1, epoch=2)
    assert epoch_of(data, 2, 5, seed=1, epoch=2) != epoch_of(data, 2, 5, seed=1, epoch=3)
    assert epoch_of(data, 2, 5, seed=1, epoch=2) != epoch_of(data, 2, 5, seed=2, epoch=2)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 60])
def test_the_test_shards_are_the_whole_test_set(workers: int) -> None:
    """Each example is tested once, even if some ranks have one more, or none."""
    source = numbered(50)
    shares = [torch.cat(source.sweep(rank, workers, 3) or [torch.empty(0)]) for rank in range(workers)]
    assert sorted(torch.cat(shares).tolist()) == list(range(50))


@pytest.mark.parametrize(("workers", "batch_size"), [(2, 26), (60, 1)])
def test_batches_that_the_data_cannot_fill_are_refused(workers: int, batch_size: int) -> None:
    """An epoch without a step would train nothing and say nothing."""
    with pytest.raises(ConfigError, match="50 training examples"):
        numbered(50).order(workers, batch_size, seed=0, epoch=0)


@pytest.mark.parametrize("loaders", [0, 2])
def test_loading_processes_and_a_start_in_the_middle_change_nothing(loaders: int) -> None:
    """What is random in a batch hangs on seeds and its number, wherever and whenever it is made."""

    def shake(batch, generator):
        return (batch[0] + torch.randint(1000, batch[0].shape, generator=generator),)

    source = Examples(torch.arange(64), augment=shake)
    order = source.order(1, 8, seed=0, epoch=0)[:, 0]
    whole = [batch[0].tolist() for batch in batches(source, order, seeds=(1, 2))]
    rest = [batch[0].tolist() for batch in batches(source, order, seeds=(1, 2), first=3, loaders=loaders)]
    assert rest == whole[3:] and len(rest) == 5
    assert whole != [batch[0].tolist() for batch in batches(source, order, seeds=(1, 3))]


def test_readers_of_a_stream_go_on_where_they_stopped() -> None:
    """So that a recurrent model's state fits the tokens that follow."""
    stream = Stream(torch.arange(101), window=5)
    order = stream.order(2, 2, seed=0, epoch=0)
    assert order.shape == (5, 2, 2)
    for rank in range(2):
        first, second, *_ = batches(stream, order[:, rank], seeds=(0,))
        assert torch.equal(first[1][:, -1], second[0][:, 0])
        assert torch.equal(first[0][:, 1:], first[1][:, :-1])


@pytest.mark.parametrize("kind", [Stream, Windows])
@pytest.mark.parametrize("workers", [1, 3, 20])
def test_a_test_stream_counts_each_token_once(workers: int, kind: type[Stream]) -> None:
    """Also where readers and windows do not divide it; what lies beyond is ignored."""
    stream = kind(torch.arange(1003), window=7)
    counted: list[int] = []
    for rank in range(workers):
        for _, targets in batches(stream, stream.sweep(rank, workers, 4), seeds=(0,)):
            counted += targets[targets != IGNORED].tolist()
    assert sorted(counted) == list(range(1, 1003))


def test_windows_are_cut_elsewhere_in_every_epoch() -> None:
    """Side by side from an offset of the epoch's own, in another order; as many in each, and all of them full."""
    source = Windows(torch.arange(1000), window=7)
    orders = [source.order(2, 5, seed=0, epoch=epoch).flatten() for epoch in range(30)]
    assert {len(order) for order in orders} == {140}
    offsets = {int(order.min()) % 7 for order in orders}
    assert offsets == set(range(7))
    for order in orders:
        assert set((order % 7).tolist()) == {int(order[0]) % 7} and len(set(order.tolist())) == 140
        _, targets = source.fetch(order, torch.Generator())
        assert int(targets.min()) > 0, "a target is ignored"
    assert not torch.equal(orders[0] // 7, orders[1] // 7)


def test_part_of_a_text_is_cut_like_the_whole() -> None:
    """Its first tokens, in windows of the same length."""
    part = part_of(Windows(torch.arange(1000), window=7), 100)
    assert isinstance(part, Windows) and (len(part), part.window) == (100, 7)
    with pytest.raises(ConfigError, match="13 training windows do not fill one step of 2 workers with 7 each"):
        part.order(2, 7, seed=0, epoch=0)


class Deadly(Examples):
    """Its loading process ends by itself, as one does that the system has killed."""

    def fetch(self, positions, generator):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_loading_process_that_dies_is_a_sentence():
    source = Deadly(torch.arange(8))
    with pytest.raises(DataError, match=r"a process that loads data has ended by itself .* use fewer --loaders"):
        list(batches(source, torch.arange(8).view(4, 2), seeds=(0,), loaders=1))
