"""Ranks under mpiexec give the same bits as the simulated network; what goes wrong is an error with a name in it."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clusters import Cluster
from messages import message
from mpiexec import on_mpi, why_no_mpi
from processes import on_processes
from programs import LENGTH, STEPS, gradient, synchronized
from spardl.collectives.program import AllReduce, Round
from spardl.config import SyncConfig
from spardl.errors import ConfigError, PeerError, ProtocolError, StateError
from spardl.transport import mpi
from spardl.transport.choice import transport_named
from spardl.transport.mpi import MPITransport, load_mpi

# What its fixtures start is started once, not once per process that runs tests.
pytestmark = pytest.mark.xdist_group("mpi")

needs_mpi = pytest.mark.skipif(why_no_mpi() is not None, reason=str(why_no_mpi()))

METHODS = ("spardl", "oktopk", "exdyna", "gtopk", "topka", "dense-ring", "dense")


def configs(workers: int) -> list[SyncConfig]:
    others = [SyncConfig(method="spardl", density=0.02, teams=workers, values="fp32", indices="raw")]
    return others + [SyncConfig(method=method, density=0.02) for method in METHODS]


def over_mpi(rank: int, workers: int) -> list[dict[str, Any]]:
    transport = MPITransport(ranks=range(workers), timeout=30)
    return [synchronized(transport, config) for config in configs(workers)]


def same_bits(ranks: list[list[dict[str, Any]]]) -> None:
    """Hold what each rank found for each configuration against the simulated network."""
    workers = len(ranks)
    for position, config in enumerate(configs(workers)):
        cluster = Cluster(workers, LENGTH, config)
        expected = [cluster.step([gradient(rank, step) for rank in range(workers)])[0] for step in range(STEPS)]
        for rank in range(workers):
            found, traffic = ranks[rank][position], cluster.network.traffic[rank]
            where = f"{config.method} on rank {rank} of {workers}"
            for mine, theirs in zip(found["results"], expected, strict=True):
                assert torch.equal(mine, theirs), where
            assert torch.equal(found["residual"], cluster.residuals()[rank]), where
            if config.method != "dense":
                assert found["moved"] == (traffic.rounds, traffic.messages, traffic.bytes_sent), where


def term(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(7, 11, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sparse_term(rank: int) -> Tensor:
    """None of rank 0's rows, some of the others', partly the same."""
    rows = torch.randperm(8, generator=torch.Generator().manual_seed(rank))[: 2 * rank]
    return torch.sparse_coo_tensor(rows[None], term(rank)[: 2 * rank, :4], (8, 4), check_invariants=True)


TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def reduced(rank: int, workers: int) -> list[Tensor]:
    transport = MPITransport(timeout=30)
    tensors = [term(rank, dtype) for dtype in TYPES]
    tensors += [term(rank).t(), term(rank)[0, :2], torch.empty(0), sparse_term(rank)]
    for tensor in tensors:
        transport.perform(AllReduce(tensor))
    return tensors


def talked(rank: int, workers: int) -> tuple[list[str], tuple[int, int, list[str]] | None]:
    texts = MPITransport(timeout=30).gather_texts("ü" * rank)
    if rank not in (0, 2):
        return texts, None
    pair = MPITransport(ranks=[2, 0], timeout=30)
    return texts, (pair.rank, pair.workers, pair.gather_texts(f"rank {rank}"))


def closed(rank: int, workers: int) -> list[str]:
    """What a closed transport says, and whether its communicator is free: MPI has room for some thousands of them."""
    transport = MPITransport(timeout=30)
    transport.close()
    transport.close()
    assert transport._comm == load_mpi().COMM_NULL
    refused = []
    for action in (
        lambda: transport.perform(AllReduce(torch.ones(1))),
        lambda: transport.perform(Round([], [(0, 1)], "late")),
        lambda: transport.gather_texts("late"),
    ):
        with pytest.raises(StateError) as caught:
            action()
        refused.append(str(caught.value))
    return refused


def chosen(rank: int, workers: int, folder: str) -> str:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=workers)
    transport = transport_named("mpi", None, timeout=10, device="cpu")
    dist.destroy_process_group()
    return f"{type(transport).__name__} {transport.rank} of {transport.workers} on {transport.device}"


Failure = tuple[str, int | None, float]


def failing(transport: MPITransport, operation: Round | AllReduce) -> Failure:
    """What it raises, whom it blames, and after how long."""
    started = time.monotonic()
    with pytest.raises((PeerError, ProtocolError)) as caught:
        transport.perform(operation)
    return f"{caught.type.__name__}: {caught.value}", caught.value.peer, time.monotonic() - started


def oversized(rank: int, workers: int) -> dict[str, Any]:
    """Rank 1 sends rank 0 a byte too many; then a swap below capacity; then tensors of different shapes."""
    found: dict[str, Any] = {}
    for size in (11, 300_000):
        transport = MPITransport(timeout=10)
        if rank == 0:
            found[f"{size} bytes"] = failing(transport, Round([], [(1, size - 1)], "swap"))
        elif rank == 1:
            transport.perform(Round([message(0, torch.zeros(size, dtype=torch.uint8))], [], "swap"))
    transport = MPITransport(timeout=10)
    if rank < 2:
        frame = torch.arange(5, dtype=torch.uint8)
        (received,) = transport.perform(Round([message(1 - rank, frame)], [(1 - rank, 9)], "swap"))
        found["shorter"] = received.tolist()
    found["shapes"] = failing(transport, AllReduce(torch.zeros(12 + 4 * rank)))
    return found


SILENCE_S = 2.0


def deserted(rank: int, workers: int, folder: str) -> dict[str, Failure]:
    """Rank 3 says nothing once two transports are made, and does not come to the third.

    It ends when the others have noticed: opening a pipe waits for whoever opens its other end.
    """
    first, second = MPITransport(timeout=SILENCE_S), MPITransport(timeout=SILENCE_S)
    if rank == 3:
        for peer in range(3):
            noticed(folder, peer).read_bytes()
        return {}
    others = [peer for peer in range(workers) if peer != rank]
    frame = torch.zeros(8, dtype=torch.uint8)
    gossip = Round([message(peer, frame) for peer in others], [(peer, 8) for peer in others], "gossip")
    found = {"gossip": failing(first, gossip), "all_reduce": failing(second, AllReduce(torch.zeros(10)))}
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        MPITransport(timeout=SILENCE_S)
    found["roll call"] = (f"PeerError: {caught.value}", caught.value.peer, time.monotonic() - started)
    noticed(folder, rank).write_bytes(b"")
    return found


def noticed(folder: str, rank: int) -> Path:
    """The pipe by which this rank tells rank 3."""
    return Path(folder) / f"noticed-{rank}"


def everything(rank: int, workers: int, folder: str) -> dict[str, Any]:
    return {
        "bits of four": over_mpi(rank, workers),
        "bits of three": over_mpi(rank, 3) if rank < 3 else None,
        "reduced": reduced(rank, workers),
        "talked": talked(rank, workers),
        "closed": closed(rank, workers),
        "chosen": chosen(rank, workers, folder),
        "oversized": oversized(rank, workers),
        "deserted": deserted(rank, workers, folder),
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found: starting them takes longer than all they do."""
    if (reason := why_no_mpi()) is not None:
        pytest.skip(reason)
    folder = str(tmp_path_factory.mktemp("mpi"))
    for rank in range(3):
        os.mkfifo(noticed(folder, rank))
    return on_mpi(4, everything, folder)


def test_mpi_and_the_simulated_network_give_the_same_bits(four: list[dict[str, Any]]) -> None:
    """Results, residuals, rounds, messages and bytes of the same programs are equal on both.

    Only an all-reduce, which a transport does as it likes, may take other rounds.
    """
    same_bits([found["bits of four"] for found in four])


def test_three_of_four_ranks_give_the_same_bits_as_well(four: list[dict[str, Any]]) -> None:
    """Not a power of two, where some methods take another way, and not all of MPI's world."""
    same_bits([found["bits of three"] for found in four[:3]])


def summed(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for one in terms[1:]:
        total += one
    return total


def test_all_reduce_sums_in_rank_order_whatever_the_tensor(four: list[dict[str, Any]]) -> None:
    """Any type, shape and stride, fewer elements than ranks, and sparse tensors."""
    wide = summed([term(rank) for rank in range(4)])
    expected = [summed([term(rank, dtype) for rank in range(4)]) for dtype in TYPES]
    expected += [wide.t(), wide[0, :2], torch.empty(0)]
    for found in four:
        *tensors, sparse = found["reduced"]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected, strict=True))
        assert torch.equal(sparse.to_dense(), summed([sparse_term(rank).to_dense() for rank in range(4)]))


def test_texts_of_any_length_are_gathered_in_rank_order(four: list[dict[str, Any]]) -> None:
    """Among all ranks, and among some of them in an order of their own."""
    texts = ["", "ü", "üü", "üüü"]
    assert [found["talked"] for found in four] == [
        (texts, (1, 2, ["rank 2", "rank 0"])),
        (texts, None),
        (texts, (0, 2, ["rank 2", "rank 0"])),
        (texts, None),
    ]


def test_a_rank_that_stays_silent_is_named_after_the_timeout(four: list[dict[str, Any]]) -> None:
    """In a round, in an all-reduce, and when the transport is made: the others know whom they waited for."""
    for found in four[:3]:
        for name, (text, peer, seconds) in found["deserted"].items():
            assert peer == 3, text
            assert text.startswith("PeerError: rank 3 (")
            assert f"sent nothing for 2 s in round 1, {name}; its process may be gone." in text
            assert seconds >= SILENCE_S


def test_a_message_over_its_capacity_is_refused(four: list[dict[str, Any]]) -> None:
    """Short ones and long ones alike, with the sender's rank; a message below its capacity arrives as it was sent."""
    first, second, *_ = (found["oversized"] for found in four)
    for size in (11, 300_000):
        text, peer, _ = first[f"{size} bytes"]
        assert peer == 1
        assert text.startswith("ProtocolError: rank 1 (")
        assert f"sent more than the {size - 1} bytes that rank 0 expected in round 1, swap" in text
    assert first["shorter"] == second["shorter"] == [0, 1, 2, 3, 4]


def test_tensors_of_different_shapes_are_not_summed(four: list[dict[str, Any]]) -> None:
    """Whether a peer's part is too long or too short, it is named."""
    for found in four:
        text, peer, _ = found["oversized"]["shapes"]
        assert text.startswith(f"ProtocolError: rank {peer} (")


def test_mpi_is_chosen_by_name(four: list[dict[str, Any]]) -> None:
    """It then counts ranks as the process group does."""
    assert [found["chosen"] for found in four] == [f"MPITransport {rank} of 4 on cpu" for rank in range(4)]


def test_a_closed_transport_says_so_and_gives_its_communicator_back(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert found["closed"] == ["this transport was closed; make another one."] * 3


class Request:
    """What MPI calls a message under way."""

    def __init__(self, *, over: bool) -> None:
        self.over, self.cancelled = over, False

    def Test(self) -> bool:
        return self.over

    def Cancel(self) -> None:
        self.cancelled = True


def test_memory_is_kept_only_while_mpi_may_still_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that has come to its end since is forgotten at the next failure; one under way is not."""
    kept: list[Any] = []
    monkeypatch.setattr(mpi, "_abandoned", kept)
    stuck, done = (mpi._Message(1, Request(over=over), torch.zeros(8), leaving=False) for over in (False, True))
    mpi._abandon([stuck, done])
    assert kept == [stuck, done] and stuck.request.cancelled
    mpi._abandon([])
    assert kept == [stuck]
    stuck.request.over = True
    mpi._abandon([])
    assert kept == []


def apart(rank: int, workers: int) -> str:
    with pytest.raises(ConfigError) as refusal:
        transport_named("mpi", None, timeout=10, device="cpu")
    return str(refusal.value)


@needs_mpi
def test_ranks_that_mpi_did_not_start_together_are_refused() -> None:
    """Without mpiexec each process is alone in its own MPI world, and nobody would ever answer."""
    for rank, text in enumerate(on_processes(2, apart)):
        assert text.startswith(f"this is rank {rank} of 2 in the process group and rank 0 of 1 for MPI;")


def test_without_mpi4py_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"pip install mpi4py"):
        MPITransport(timeout=1)


def test_an_unknown_transport_is_refused() -> None:
    """The sentence lists those that there are."""
    with pytest.raises(ConfigError, match=r"there is no transport 'mpich'\. Did you mean mpi"):
        transport_named("mpich", None, timeout=1, device="cpu")
