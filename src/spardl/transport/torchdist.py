"""torch.distributed: gloo on CPU, NCCL with device buffers. NCCL itself has never been run by us: tests drive this file
against a group that refuses what NCCL would refuse (docs/gpu.md).

Point-to-point messages on a process group of our own, so that DDP's collectives on the main thread cannot cross ours.
Every wait has a deadline, also those for the store through which ranks meet, and its error names the peer: gloo knows
at most whom it has waited for, so ranks ask each other who is to blame (`watch.py`).
"""

import functools
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from spardl import _torch_private
from spardl.collectives.program import AllReduce, Operation, Round
from spardl.errors import ConfigError, PeerError, ProtocolError
from spardl.host import download, upload
from spardl.metrics import Traffic
from spardl.sparse import Array
from spardl.transport import checksums, failures, texts
from spardl.transport.address import own_address, routed_address
from spardl.transport.base import use_the_time
from spardl.transport.inquiry import Verdict, inquire
from spardl.transport.meeting import GRACE_S, Meeting
from spardl.transport.members import Group, Members, members_of
from spardl.transport.patience import within
from spardl.transport.ring import count_ring
from spardl.transport.sparse_sum import count_sparse, sum_sparse
from spardl.transport.watch import Watch

THREADS = 2  # of a group, as torch has it

MEETING = "the meeting of the ranks"

_Posts = list[tuple[int, Tensor]]  # peers, each with what it is sent, or where what it sends arrives
_Works = list[tuple[int, str, Any]]  # what is under way: whom an error names, what they should have done, torch's work

POLL_S = 1e-3  # how often NCCL is asked whether messages have arrived


class TorchTransport:
    """Rank `rank` of `workers`, numbered as in the group it was made from.

    Making one is collective: all ranks of `group` (default: all) must do it, in the same order.
    """

    def __init__(self, group: Group = None, *, timeout: float, device: torch.device | str = "cpu") -> None:
        members = members_of(group)
        self.device = torch.device(device)
        self.traffic = Traffic()
        self.checks = False
        self._timeout = timedelta(seconds=timeout)
        if not members.known and self.device.type != "cpu":
            raise ConfigError(
                f"between ranks of {group!r}, which torch does not know, messages travel from the CPU's memory, not"
                f' {self.device}; set residuals_on="cpu".'
            )
        self.rank = members.rank
        self.workers = len(members.ranks)
        self.addresses = [""] * self.workers
        self._ranks = members.ranks
        self._sent = [0] * self.workers
        self._received = [0] * self.workers
        self._awaited: list[int] = []  # in this round
        self._under_way: list[tuple[Any, tuple[int, ...], str]] = []  # by NCCL: works, whom they need, their names
        self._group: Any = None
        self.watch = Watch(self.rank)
        self.watch.for_whom(self.pending)
        backend = "gloo" if self.device.type == "cpu" else dist.get_backend()
        self._by_nccl = backend == "nccl"
        try:
            self._meet(members, backend)
        except BaseException:
            self.watch.close()
            raise

    def _meet(self, members: Members, backend: str) -> None:
        """Find all ranks, then make the group."""
        meeting = Meeting(members, self._timeout.total_seconds())
        place = None if members.known else _torch_private.store_place(members.store)
        address = routed_address(None if place is None else place[0])
        if meeting.place is not None and self.workers > 1:
            self.watch.open(own_address(address), meeting.gather)
        self._begins(MEETING)
        self._group = self._make_group(members, backend, meeting)
        self.watch.operation = None
        if meeting.place is None and self.workers > 1:
            self.watch.open(own_address(address), self.gather_texts)
        self.addresses = self.gather_texts(address)

    def _make_group(self, members: Members, backend: str, meeting: Meeting) -> Any:
        ranks = members.ranks

        def make() -> Any:
            ours = backend == "gloo" and meeting.place is not None
            made = _gloo_group(meeting.place, members, self._timeout) if ours else None
            if made is None and not members.known:
                raise ConfigError("this torch has no way to connect ranks that it does not know; take a newer one.")
            # Only members meet here: other ranks may be making groups of their own.
            return made or dist.new_group(ranks, self._timeout, backend, use_local_synchronization=True)

        seconds = self._timeout.total_seconds()
        try:
            return within(seconds + GRACE_S, make, lambda: TimeoutError(f"{MEETING} took longer than {seconds:g} s"))
        except (RuntimeError, TimeoutError) as error:
            verdict = self._inquire(self._others())
            if meeting.place is not None and not verdict.faults and not meeting.answers():
                raise meeting.silent() from error
            did = f"did not come within {seconds:g} s"
            raise self._told(failures.judged(verdict, self.rank, self._who, did, MEETING)) from error

    def perform(self, operation: Operation) -> Any:
        self._check_open()
        started = time.perf_counter()
        self._begins(operation)
        if isinstance(operation, AllReduce):
            arrived = self._all_reduce(operation, started)
        else:
            arrived = self._round(operation, started)
        self.watch.operation = None
        return arrived

    def pending(self, operation: object) -> Collection[int]:
        """Whom an operation that is under way waits for: a round for some, a collective for all."""
        return self._awaited if isinstance(operation, Round) else self._others()

    def _begins(self, operation: object) -> None:
        self.watch.operation, self.watch.since = operation, time.monotonic()

    def _others(self) -> list[int]:
        return [peer for peer in range(self.workers) if peer != self.rank]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        self._check_open()
        self._begins("gather_texts")
        gathered = texts.gather_texts(text, lambda mine: self._gather(mine, "gather_texts"))
        self.watch.operation = None
        return gathered

    def close(self) -> None:
        """Leave our groups. The one that this transport was made from stays."""
        self.watch.close()  # first: whoever finds our group ended and asks must not hear that we are still there
        self.leave()

    def leave(self) -> None:
        """The same, but for the watch, which another transport goes on with."""
        # One that torch made for us it also keeps; with the default group all of them have ended.
        kept = _torch_private.gloo_behind(self._group)
        if isinstance(self._group, dist.ProcessGroup) and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
        del kept

    def _check_open(self) -> None:
        if self._group is None:
            raise failures.closed()

    # --- operations -----------------------------------------------------------------------------------------------

    def _round(self, operation: Round, started: float) -> list[Tensor]:
        if not self.checks:
            return self._plain_round(operation, started)
        return checksums.opened(operation, self._plain_round(checksums.sealed(operation), started), self._who)

    def _plain_round(self, operation: Round, started: float) -> list[Tensor]:
        sends = [(peer, self._payload(frame, capacity)) for peer, frame, capacity in operation.send]
        receives = [
            (peer, torch.empty(capacity, dtype=torch.uint8, device=self.device)) for peer, capacity in operation.receive
        ]
        works = (self._post_at_once if self._by_nccl else self._post)(sends, receives)
        self._awaited = [peer for peer, _ in (*receives, *sends)]
        started += use_the_time(operation)
        for peer, verb, work in works:
            if self._by_nccl:
                self._queue(work, self._awaited, operation.name)
            else:
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

    def _all_reduce(self, operation: AllReduce, started: float) -> Any:
        if self.workers == 1:
            return None
        tensor, name = operation.tensor, operation.name
        if tensor.layout is not torch.strided:

            def refuse(peer: int) -> ProtocolError:
                return failures.unlike_entries(peer, self._who(peer), name, self.rank)

            sizes = sum_sparse(tensor, lambda mine: self._gather(mine, name), refuse)
            count_sparse(self.traffic, sizes, self.rank, time.perf_counter() - started)
            return None
        work = self._group.allreduce([tensor], dist.AllreduceOptions())
        if self._by_nccl:
            self._queue(work, self._others(), name)
        else:
            self._wait_for_all(work, name)
        count_ring(self.traffic, tensor.numel() * tensor.element_size(), self.workers, time.perf_counter() - started)
        return None

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

    def _queue(self, work: dist.Work, peers: Collection[int], name: str) -> None:
        """Let the device wait for this, and the host go on: with a deadline torch would hold the host as well."""
        work.wait()
        self._under_way.append((work, tuple(peers), name))

    def arrive(self) -> None:
        self._check_open()
        deadline, seconds = time.monotonic() + self._timeout.total_seconds(), self._timeout.total_seconds()
        under_way, self._under_way = self._under_way, []
        for work, peers, name in under_way:
            self._begins(name)
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if not work.is_completed():
                verdict, where = self._inquire(peers), failures.place(self.traffic, name)
                did = f"sent or took nothing for {seconds:g} s"
                raise self._told(failures.judged(verdict, self.rank, self._who, did, where))
        self.watch.operation = None

    def _wait(self, work: dist.Work, peer: int, name: str, verb: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            late, why = "timed out" in str(error).lower(), failures.first_line(error)
            did = f"{verb} nothing for {self._timeout.total_seconds():g} s" if late else f"broke off ({why})"
            verdict = self._inquire(self._awaited)
            if not late and not verdict.faults:
                raise self._told(
                    failures.broken(peer, self._who(peer), failures.place(self.traffic, name), why)
                ) from error
            where = failures.place(self.traffic, name)
            raise self._told(failures.judged(verdict, self.rank, self._who, did, where)) from error
        self._awaited.remove(peer)

    def _wait_for_all(self, work: dist.Work, name: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            verdict, what = self._inquire(self._others()), f"{name} over {self.workers} ranks"
            said = failures.collective(verdict, self.rank, self._who, what, failures.first_line(error))
            raise self._told(said) from error

    def _inquire(self, suspects: Collection[int]) -> Verdict:
        since, timeout = self.watch.since, self._timeout.total_seconds()
        return inquire(self.watch, suspects, self.workers, since=since, timeout=timeout)

    def _told(self, error: PeerError) -> PeerError:
        """The same, when all others that can hear it were told who is to blame."""
        if error.peer is not None:
            self.watch.tell(error.peer, [peer for peer in self._others() if peer not in error.candidates])
        return error

    def _who(self, peer: int) -> str:
        return failures.named(peer, self.addresses[peer])


def padded(frame: Tensor, capacity: int) -> Tensor:
    """The frame, filled up to what its receiver has room for: NCCL needs both sides to name the same size."""
    return torch.nn.functional.pad(frame, (0, capacity - frame.numel()))


def _gloo_group(store: Store, members: Members, timeout: timedelta) -> Any:
    """A group of our own, on the threads of the default one; None where torch has no way to make it.

    `dist.new_group` would make a device for it, whose thread wakes up a hundred times per second for as long as it
    lives: of 8 ranks on 2 cores, one idle group makes a step almost 2 % longer.
    """
    devices = _torch_private.gloo_devices() or [_own_device()]
    rank, size = members.rank, len(members.ranks)
    return _torch_private.gloo_group(store, rank, size, devices=devices, threads=THREADS, timeout=timeout)


@functools.cache
def _own_device() -> Any:
    """For all groups of ours where the default one has none: one per process, as each has a thread that wakes up."""
    return dist.ProcessGroupGloo.create_default_device()
