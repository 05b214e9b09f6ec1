"""torch.distributed: gloo on CPU, NCCL with device buffers. NCCL itself has never been run by us: tests drive this file
against a group that refuses what NCCL would refuse (docs/gpu.md).

Point-to-point messages on a process group of our own, so that DDP's collectives on the main thread cannot cross ours.
Every wait has a deadline, and its error names the peer.
"""

import functools
import os
import socket
import time
import zlib
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from spardl import _torch_private
from spardl.collectives.program import AllReduce, Operation, Round
from spardl.errors import ConfigError, PeerError, ProtocolError
from spardl.host import download, upload
from spardl.metrics import Traffic
from spardl.sparse import Array
from spardl.transport import failures, texts
from spardl.transport.base import use_the_time
from spardl.transport.ring import count_ring
from spardl.transport.sparse_sum import count_sparse, sum_sparse

THREADS = 2  # of a group, as torch has it

ANSWER_S = 2.0  # that a live rank may take to say so, after a collective has failed

Group = dist.ProcessGroup | DeviceMesh | None

_Posts = list[tuple[int, Tensor]]  # peers, each with what it is sent, or where what it sends arrives
_Works = list[tuple[int, str, Any]]  # what is under way: whom an error names, what they should have done, torch's work


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
        self._ranks = ranks
        self._by_nccl = backend == "nccl"
        self._sent = [0] * self.workers
        self._received = [0] * self.workers
        self.addresses = self.gather_texts(_own_address())

    def perform(self, operation: Operation) -> Any:
        self._check_open()
        started = time.perf_counter()
        if isinstance(operation, AllReduce):
            self._all_reduce(operation, started)
            return None
        return self._round(operation, started)

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        self._check_open()
        return texts.gather_texts(text, lambda mine: self._gather(mine, "gather_texts"))

    def close(self) -> None:
        """Leave our groups. The one that this transport was made from stays."""
        for group in (self._group, self._watch):
            # Those that torch made for us it also keeps; with the default group all of them have ended.
            if isinstance(group, dist.ProcessGroup) and dist.is_initialized():
                dist.destroy_process_group(group)
        self._group = self._watch = None

    def _check_open(self) -> None:
        if self._group is None:
            raise failures.closed()

    # --- operations -----------------------------------------------------------------------------------------------

    def _round(self, operation: Round, started: float) -> list[Tensor]:
        sends = [(peer, self._payload(frame, capacity)) for peer, frame, capacity in operation.send]
        receives = [
            (peer, torch.empty(capacity, dtype=torch.uint8, device=self.device)) for peer, capacity in operation.receive
        ]
        works = (self._post_at_once if self._by_nccl else self._post)(sends, receives)
        started += use_the_time(operation)
        for peer, verb, work in works:
            self._wait(work, peer, operation.name, verb)
        self.traffic.count(
            rounds=1,
            messages=len(sends),
            sent=sum(payload.numel() for _, payload in sends),
            received=sum(buffer.numel() for _, buffer in receives),
            seconds=time.perf_counter() - started,
        )
        return [buffer for _, buffer in receives]

    def _payload(self, frame: Array, capacity: int) -> Tensor:
        """The bytes to send, on our device; NCCL needs both sides of a message to name the same size."""
        bytes_ = frame if isinstance(frame, Tensor) else upload(frame, self.device)
        return padded(bytes_, capacity) if self._by_nccl else bytes_.to(self.device)

    def _post(self, sends: _Posts, receives: _Posts) -> _Works:
        """Start each message by itself; receives first, so that what arrives has a place."""
        works: _Works = []
        for peer, buffer in receives:
            works.append((peer, "sent", self._group.recv([buffer], peer, self._received[peer])))
            self._received[peer] += 1
        for peer, payload in sends:
            works.append((peer, "took", self._group.send([payload], peer, self._sent[peer])))
            self._sent[peer] += 1
        return works

    def _post_at_once(self, sends: _Posts, receives: _Posts) -> _Works:
        """Start a round as one operation: NCCL works off single messages in order, and two ranks that both begin by
        receiving would wait for each other for ever."""
        ranks, group = self._ranks, self._group
        batch = [dist.P2POp(dist.irecv, buffer, ranks[peer], group) for peer, buffer in receives]
        batch += [dist.P2POp(dist.isend, payload, ranks[peer], group) for peer, payload in sends]
        if not batch:
            return []
        peer, verb = (receives[0][0], "sent") if receives else (sends[0][0], "took")
        return [(peer, verb, work) for work in dist.batch_isend_irecv(batch)]

    def _all_reduce(self, operation: AllReduce, started: float) -> None:
        if self.workers == 1:
            return
        tensor, name = operation.tensor, operation.name
        if tensor.layout is not torch.strided:

            def refuse(peer: int) -> ProtocolError:
                return failures.unlike_entries(peer, self._who(peer), name, self.rank)

            sizes = sum_sparse(tensor, lambda mine: self._gather(mine, name), refuse)
            count_sparse(self.traffic, sizes, self.rank, time.perf_counter() - started)
            return
        self._wait_for_all(self._group.allreduce([tensor], dist.AllreduceOptions()), name)
        count_ring(self.traffic, tensor.numel() * tensor.element_size(), self.workers, time.perf_counter() - started)

    def _gather(self, mine: Tensor, name: str) -> list[Tensor]:
        """Every rank's bytes, in rank order: first how many, then the bytes themselves, filled up to the most."""
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.workers)]
        self._wait_for_all(self._group.allgather([sizes], [upload([mine.numel()], self.device)]), name)
        counts = download(torch.cat(sizes)).tolist()
        ours = padded(mine.to(self.device, non_blocking=True), max(1, *counts))
        everyone = [torch.empty_like(ours) for _ in sizes]
        self._wait_for_all(self._group.allgather([everyone], [ours]), name)
        together = torch.from_numpy(download(torch.stack(everyone)))
        return [theirs[:count] for theirs, count in zip(together, counts, strict=True)]

    # --- waiting --------------------------------------------------------------------------------------------------

    def _wait(self, work: dist.Work, peer: int, name: str, verb: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            who, where = self._who(peer), failures.place(self.traffic, name)
            if "timed out" in str(error).lower():
                raise failures.silent(peer, who, verb, self._timeout.total_seconds(), where) from error
            raise failures.broken(peer, who, where, failures.first_line(error)) from error

    def _wait_for_all(self, work: dist.Work, name: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            gone, silent = self._missing()
            peer = next(iter(gone + silent), None)
            why = failures.first_line(error)  # if all of them answer after all
            if peer is not None:
                why = f"{self._who(peer)} {'is gone' if gone else 'does not answer'}"
            raise failures.collective(name, self.workers, why, peer) from error

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

    def _who(self, peer: int) -> str:
        return failures.named(peer, self.addresses[peer])


def padded(frame: Tensor, capacity: int) -> Tensor:
    """The frame, filled up to what its receiver has room for: NCCL needs both sides to name the same size."""
    return torch.nn.functional.pad(frame, (0, capacity - frame.numel()))


def _gloo_group(ranks: list[int], timeout: timedelta) -> Any:
    """A group of our own, on the threads of the default one.

    `dist.new_group` would make a device for it, whose thread wakes up a hundred times per second for as long as it
    lives: of 8 ranks on 2 cores, one idle group makes a step almost 2 % longer. It serves where torch has no other way.
    """
    rank = ranks.index(dist.get_rank())
    store = _store_for(ranks, rank)
    if store is not None:
        store.set(f"here/{rank}", "")
        devices = _torch_private.gloo_devices() or [_own_device()]
        try:
            made = _torch_private.gloo_group(store, rank, len(ranks), devices=devices, threads=THREADS, timeout=timeout)
        except RuntimeError as error:
            absence = _absence(store, len(ranks), timeout)
            if absence is None:
                raise
            raise absence from error
        if made is not None:
            return made
    return dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)


def _store_for(ranks: list[int], rank: int) -> Store | None:
    """A part of the default group's store that only the next group of these ranks uses; None where torch hides it.

    The store itself counts the groups that each rank has made so far, as all of them do: a count of ours would outlive
    the process group and differ from that of a rank that was restarted.
    """
    store = _torch_private.default_store()
    if store is None:
        return None
    own = PrefixStore(f"spardl/{zlib.crc32(repr(ranks).encode())}", store)
    return PrefixStore(str(own.add(f"made/{rank}", 1)), own)


def _absence(store: Store, workers: int, timeout: timedelta) -> PeerError | None:
    """The error for a rank that did not come to a new group; None if all of them did."""
    missing = [peer for peer in range(workers) if not store.check([f"here/{peer}"])]
    if not missing:
        return None
    return PeerError(
        f"rank {missing[0]} of {workers} did not come within {timeout.total_seconds():g} s; all ranks of a group"
        " must attach, or call all_reduce, in the same order.",
        peer=missing[0],
    )


@functools.cache
def _own_device() -> Any:
    """For all groups of ours where the default one has none: one per process, as each has a thread that wakes up."""
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
