"""torch.distributed: gloo on CPU. NCCL takes the same path with device buffers; it has never been run by us.

Point-to-point messages on a process group of our own, so that DDP's collectives on the main thread cannot cross ours.
Every wait has a deadline, and its error names the peer.
"""

import functools
import os
import socket
import time
import zlib
from collections import Counter
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from spardl.collectives.program import AllReduce, Operation, Round
from spardl.errors import ConfigError, PeerError
from spardl.metrics import Traffic

THREADS = 2  # of a group, as torch has it

ANSWER_S = 2.0  # that a live rank may take to say so, after a collective has failed

Group = dist.ProcessGroup | DeviceMesh | None

_made: Counter[tuple[int, ...]] = Counter()  # groups with these members so far, as all of them count


class TorchTransport:
    """Rank `rank` of `workers`, numbered as in the group it was made from.

    Making one is collective: all ranks of `group` (default: all) must do it, in the same order.
    """

    def __init__(self, group: Group = None, *, timeout: float, device: torch.device | str = "cpu") -> None:
        if not dist.is_initialized():
            raise ConfigError("there is no process group; call torch.distributed.init_process_group first.")
        ranks = member_ranks(group)
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._timeout = timedelta(seconds=timeout)
        backend = "gloo" if self.device.type == "cpu" else dist.get_backend()
        if dist.get_rank() not in ranks:
            raise ConfigError(f"rank {dist.get_rank()} is not in the group {ranks} that it should synchronise with.")
        if backend == "gloo":
            self._group: Any = _gloo_group(ranks, self._timeout)
        else:
            # Only members meet here, as for gloo: other ranks may be making groups of their own.
            self._group = dist.new_group(ranks, self._timeout, backend, use_local_synchronization=True)
        # Unused until a collective fails, which leaves its own group useless; then it finds out who is gone.
        self._watch = _gloo_group(ranks, self._timeout)
        self.rank = ranks.index(dist.get_rank())
        self.workers = len(ranks)
        self.addresses = [""] * self.workers
        self._fixed_size = backend == "nccl"
        self._sent = [0] * self.workers
        self._received = [0] * self.workers
        self.addresses = self.gather_texts(_own_address())

    def perform(self, operation: Operation) -> Any:
        started = time.perf_counter()
        if isinstance(operation, AllReduce):
            self._all_reduce(operation, started)
            return None
        return self._round(operation, started)

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        mine = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.workers)]
        self._wait_for_all(self._group.allgather([sizes], [sizes[0].new_tensor([len(text.encode())])]), "gather_texts")
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        texts = [torch.empty_like(padded) for _ in sizes]
        self._wait_for_all(self._group.allgather([texts], [padded]), "gather_texts")
        return [bytes(text[: int(size)].tolist()).decode() for text, size in zip(texts, sizes, strict=True)]

    def _round(self, operation: Round, started: float) -> list[Tensor]:
        sends = [(peer, torch.as_tensor(frame, device=self.device)) for peer, frame in operation.send]
        arriving = []
        for peer, capacity in operation.receive:
            buffer = torch.empty(capacity, dtype=torch.uint8, device=self.device)
            arriving.append((peer, buffer, self._group.recv([buffer], peer, self._received[peer])))
            self._received[peer] += 1
        leaving = []
        for peer, frame in sends:
            payload = self._padded(frame, operation) if self._fixed_size else frame
            leaving.append((peer, payload, self._group.send([payload], peer, self._sent[peer])))
            self._sent[peer] += 1
        started += operation.use_the_time()
        for peer, _, work in arriving:
            self._wait(work, peer, operation.name, "sent nothing")
        for peer, _, work in leaving:
            self._wait(work, peer, operation.name, "took nothing")
        self.traffic.count(
            rounds=1,
            messages=len(leaving),
            sent=sum(payload.numel() for _, payload, _ in leaving),
            received=sum(buffer.numel() for _, buffer, _ in arriving),
            seconds=time.perf_counter() - started,
        )
        return [buffer for _, buffer, _ in arriving]

    def _padded(self, frame: Tensor, operation: Round) -> Tensor:
        """NCCL needs both sides to name the same size: blocks are alike, so what we expect is what we fill."""
        capacity = max([frame.numel(), *(size for _, size in operation.receive)])
        return torch.nn.functional.pad(frame, (0, capacity - frame.numel()))

    def _all_reduce(self, operation: AllReduce, started: float) -> None:
        if self.workers == 1:
            return
        options = dist.AllreduceOptions()
        self._wait_for_all(self._group.allreduce([operation.tensor], options), operation.name)
        size = operation.tensor.numel() * operation.tensor.element_size()
        moved = round(2 * size * (self.workers - 1) / self.workers)
        rounds = 2 * (self.workers - 1)
        self.traffic.count(
            rounds=rounds, messages=rounds, sent=moved, received=moved, seconds=time.perf_counter() - started
        )

    def _wait(self, work: dist.Work, peer: int, name: str, failure: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            who = f"rank {peer} ({self.addresses[peer]})"
            where = f"round {self.traffic.rounds + 1}, {name}"
            if "timed out" in str(error).lower():
                text = f"{who} {failure} for {self._timeout.total_seconds():g} s in {where}; its process may be gone."
            else:
                text = f"{who} broke off in {where}: {_first_line(error)}."
            raise PeerError(f"{text} Residuals are intact; resume from the last checkpoint.", peer=peer) from error

    def _wait_for_all(self, work: dist.Work, name: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            gone, silent = self._missing()
            peer = next(iter(gone + silent), None)
            why = _first_line(error)  # if all of them answer after all
            if peer is not None:
                why = f"rank {peer} ({self.addresses[peer]}) {'is gone' if gone else 'does not answer'}"
            raise PeerError(
                f"{name} over {self.workers} ranks failed: {why}."
                " Residuals are intact; resume from the last checkpoint.",
                peer=peer,
            ) from error

    def _missing(self) -> tuple[list[int], list[int]]:
        """Peers whose connection is closed, and peers that stay silent when every rank sends every other a byte."""
        gone: list[int] = []
        silent: list[int] = []
        answers = []
        word = torch.zeros(1, dtype=torch.uint8)
        for peer in set(range(self.workers)) - {self.rank}:
            heard = torch.zeros_like(word)
            try:
                said = self._watch.send([word], peer, 0)
                answers.append((peer, self._watch.recv([heard], peer, 0), heard, said))
            except RuntimeError:
                gone.append(peer)
        patience = min(self._timeout, timedelta(seconds=ANSWER_S))
        for peer, answer, _, _ in answers:
            try:
                answer.wait(patience)
            except RuntimeError as error:
                (silent if "timed out" in str(error).lower() else gone).append(peer)
        return gone, silent


def _gloo_group(ranks: list[int], timeout: timedelta) -> Any:
    """A group of our own, on the threads of the default one.

    `dist.new_group` would make a device for it, whose thread wakes up a hundred times per second for as long as it
    lives: of 8 ranks on 2 cores, one idle group makes a step almost 2 % longer.
    """
    _made[tuple(ranks)] += 1
    name = f"spardl/{zlib.crc32(repr(ranks).encode())}/{_made[tuple(ranks)]}"
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = _devices(), THREADS, timeout
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank = ranks.index(dist.get_rank())
    store.set(f"here/{rank}", "")
    try:
        return gloo(store, rank, len(ranks), options)
    except RuntimeError as error:
        missing = [peer for peer in range(len(ranks)) if not store.check([f"here/{peer}"])]
        if not missing:
            raise
        raise PeerError(
            f"rank {missing[0]} of {len(ranks)} did not come within {timeout.total_seconds():g} s; all ranks of a group"
            " must attach, or call all_reduce, in the same order.",
            peer=missing[0],
        ) from error


def _devices() -> list[Any]:
    """Those of the default group, or one for all groups of ours where it has none."""
    world: Any = dist.group.WORLD
    try:
        return list(world._get_backend(torch.device("cpu")).options._devices)
    except (RuntimeError, AttributeError):  # it is not gloo's
        return [_own_device()]


@functools.cache
def _own_device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


def member_ranks(group: Group) -> list[int]:
    """Global ranks in synchronisation order; a two-dimensional mesh lists team after team."""
    if isinstance(group, DeviceMesh):
        return [int(rank) for rank in np.asarray(group.mesh.cpu()).flatten()]
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _own_address() -> str:
    """The address that peers see, found by asking for a route to the master; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
