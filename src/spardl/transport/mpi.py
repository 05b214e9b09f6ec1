"""MPI through mpi4py: the same programs point to point, on a communicator of our own.

No wait blocks: requests are tested until they are done or the deadline has passed, and the error names the peer. MPI
itself never learns of our deadlines, so a peer that is gone is noticed here or by the launcher, whoever is first.
Messages go through host memory; a device's tensors are copied there and back.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spardl.collectives.program import AllReduce, Operation, Round
from spardl.errors import ConfigError, PeerError, ProtocolError
from spardl.extras import how_to_install
from spardl.metrics import Traffic
from spardl.transport import checksums, failures, texts
from spardl.transport.base import use_the_time
from spardl.transport.sparse_sum import as_bytes, count_sparse, sum_in_order, sum_sparse

# A wait begins with this number of tests in a row; then come naps, which double from the first to the longest.
EAGER_TESTS = 64
FIRST_NAP_S, LONGEST_NAP_S = 20e-6, 1e-3

# On the caller's communicator, only while ours is being made.
ROLL_CALL_TAG = 31_337

# Requests that outlived their deadline, with the memory that MPI may still read or write. They belong to the process
# and not to a transport, which may be gone before MPI is done with them. As soon as it is, the next failure drops them.
_abandoned: "list[_Message]" = []


@dataclass(slots=True)
class _Message:
    """One message under way. `memory` must live as long as the request."""

    peer: int
    request: Any
    memory: Tensor
    leaving: bool
    arrived: int = 0


class MPITransport:
    """Rank `rank` of `workers`, numbered as `ranks` (default: all) lists the ranks of `communicator` (default: world).

    Making one is collective over `ranks`. All-reduce sums in rank order, as the simulated network does: bit-identical
    on all ranks and in every run.
    """

    def __init__(
        self,
        communicator: Any = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self._mpi = load_mpi()
        whole = self._mpi.COMM_WORLD if communicator is None else communicator
        members = list(range(whole.size)) if ranks is None else list(ranks)
        if whole.rank not in members:
            raise ConfigError(f"rank {whole.rank} is not in the group {members} that it should synchronise with.")
        self.rank = members.index(whole.rank)
        self.workers = len(members)
        self.device = torch.device(device)
        self.traffic = Traffic()
        self.checks = False
        self.addresses = [f"MPI rank {member}" for member in members]
        self._timeout = timeout
        self._closed = self._failed = False
        # The roll call tells who is missing; making a communicator would only wait for them.
        self._comm, self._numbers, self._tag = whole, members, ROLL_CALL_TAG
        self._exchange_with_all(torch.empty(0, dtype=torch.uint8), [0] * self.workers, "roll call")
        self._comm = self._private(whole, members)
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._numbers, self._tag = list(range(self.workers)), 0
        self.addresses = self.gather_texts(self._mpi.Get_processor_name())

    def perform(self, operation: Operation) -> Any:
        self._check_open()
        started = time.perf_counter()
        if isinstance(operation, AllReduce):
            self._all_reduce(operation, started)
            return None
        return self._round(operation, started) if not self.checks else self._checked(operation, started)

    def _checked(self, operation: Round, started: float) -> list[Tensor]:
        return checksums.opened(operation, self._round(checksums.sealed(operation), started), self._who)

    def _round(self, operation: Round, started: float) -> list[Tensor]:
        busy: list[float] = []
        sends = [(peer, torch.as_tensor(frame)) for peer, frame, _ in operation.send]
        frames = self._exchange(sends, operation.receive, operation.name, lambda: busy.append(use_the_time(operation)))
        self._count(1, [frame for _, frame in sends], frames, started + sum(busy))
        return [frame.to(self.device) for frame in frames]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        self._check_open()
        return texts.gather_texts(text, lambda mine: self._gather(mine, "gather_texts"))

    def arrive(self) -> None:
        """Whatever was performed is over."""

    def close(self) -> None:
        """Free the communicator, unless a message on it has failed: MPI may still be busy with that."""
        if not self._closed and not self._failed:
            self._comm.Free()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise failures.closed()

    def _private(self, whole: Any, members: list[int]) -> Any:
        """A communicator in which nobody else's messages can cross ours."""
        if members != list(range(whole.size)):
            return whole.Create_group(whole.group.Incl(members))
        private, request = whole.Idup()
        try:
            self._finish([_Message(self.rank, request, torch.empty(0), leaving=True)], "")
        except PeerError as error:
            raise PeerError(
                f"not all of {self.workers} ranks made a communicator within {self._timeout:g} s; one may be gone."
            ) from error
        return private

    # --- operations -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _all_reduce(self, operation: AllReduce, started: float) -> None:
        """Each rank sums one part of the tensor, then all hand theirs round: two rounds, the bytes of a ring."""
        if self.workers == 1:
            return
        tensor, name = operation.tensor, operation.name
        if tensor.layout is not torch.strided:
            sizes = sum_sparse(tensor, lambda mine: self._gather(mine, name), lambda peer: self._unlike(peer, name))
            count_sparse(self.traffic, sizes, self.rank, time.perf_counter() - started)
            return
        flat = tensor.cpu().reshape(-1)
        parts = list(flat.tensor_split(self.workers))
        mine = parts[self.rank]
        outgoing = [(peer, as_bytes(parts[peer])) for peer in self._others()]
        arrived = self._exchange(outgoing, [(peer, as_bytes(mine).numel()) for peer in self._others()], name)
        self._count(1, [part for _, part in outgoing], arrived, started)
        terms = {peer: self._part(frame, mine, peer, name) for peer, frame in zip(self._others(), arrived, strict=True)}
        total = sum_in_order([mine if rank == self.rank else terms[rank] for rank in range(self.workers)])
        started = time.perf_counter()
        gathered = self._exchange_with_all(as_bytes(total), [as_bytes(part).numel() for part in parts], name)
        self._count(1, [as_bytes(total)] * (self.workers - 1), _without(gathered, self.rank), started)
        whole = [
            self._part(frame, part, rank, name) for rank, (frame, part) in enumerate(zip(gathered, parts, strict=True))
        ]
        tensor.copy_(torch.cat(whole).view(tensor.shape))

    def _part(self, frame: Tensor, like: Tensor, peer: int, name: str) -> Tensor:
        """What a rank sent for this part of the tensor; it must have just as many bytes."""
        expected = as_bytes(like).numel()
        if frame.numel() != expected:
            sent = f"{frame.numel()} bytes in {name}, where rank {self.rank} expected {expected}"
            raise failures.unlike(peer, self._who(peer), sent)
        return frame.view(like.dtype)

    def _gather(self, mine: Tensor, name: str) -> list[Tensor]:
        """Every rank's bytes, in rank order: first how many, then the bytes themselves."""
        size = as_bytes(torch.tensor([mine.numel()]))
        sizes = [int(told.view(torch.int64)) for told in self._exchange_with_all(size, [8] * self.workers, name)]
        return self._exchange_with_all(mine, sizes, name)

    def _exchange_with_all(self, mine: Tensor, capacities: Sequence[int], name: str) -> list[Tensor]:
        """Send `mine` to every peer. What each of them sent, in rank order, with `mine` in its place."""
        outgoing = [(peer, mine) for peer in self._others()]
        arrived = self._exchange(outgoing, [(peer, capacities[peer]) for peer in self._others()], name)
        return [*arrived[: self.rank], mine, *arrived[self.rank :]]

    def _others(self) -> list[int]:
        return [peer for peer in range(self.workers) if peer != self.rank]

    def _count(self, rounds: int, sent: Sequence[Tensor], received: Sequence[Tensor], started: float) -> None:
        self.traffic.count(
            rounds=rounds,
            messages=len(sent),
            sent=sum(frame.numel() for frame in sent),
            received=sum(frame.numel() for frame in received),
            seconds=time.perf_counter() - started,
        )

    # --- messages -------------------------------------------------------------------------------------------------

    def _exchange(
        self,
        send: list[tuple[int, Tensor]],
        receive: list[tuple[int, int]],
        name: str,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Send these and receive those, each cut to the bytes that came; `meanwhile` runs when all are under way."""
        arriving = [_Message(peer, None, torch.empty(size, dtype=torch.uint8), leaving=False) for peer, size in receive]
        leaving = [_Message(peer, None, frame.detach().cpu().contiguous(), leaving=True) for peer, frame in send]
        messages = [*arriving, *leaving]
        try:
            for message in messages:
                self._start(message, name)
            meanwhile()
            self._finish(messages, name)
        except BaseException:
            self._failed = True
            _abandon(messages)
            raise
        return [message.memory[: message.arrived] for message in arriving]

    def _start(self, message: _Message, name: str) -> None:
        begin = self._comm.Isend if message.leaving else self._comm.Irecv
        try:
            message.request = begin([message.memory.numpy(), self._mpi.BYTE], self._numbers[message.peer], self._tag)
        except self._mpi.Exception as error:
            raise self._broken(message, name, error) from error

    def _finish(self, pending: list[_Message], name: str) -> None:
        """Test until all are done or it is too late; naps grow while nothing happens."""
        deadline = time.monotonic() + self._timeout
        tests, nap = 0, FIRST_NAP_S
        while still := [message for message in pending if not self._is_done(message, name)]:
            if len(still) < len(pending):
                tests, nap = 0, FIRST_NAP_S
            pending, tests = still, tests + 1
            if time.monotonic() > deadline:
                raise self._too_late(pending[0], name)
            if tests <= EAGER_TESTS:
                time.sleep(0)
            else:
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP_S)

    def _is_done(self, message: _Message, name: str) -> bool:
        status = self._mpi.Status()
        try:
            done = bool(message.request.Test(status))
        except self._mpi.Exception as error:
            raise self._broken(message, name, error) from error
        if done and not message.leaving:
            message.arrived = status.Get_count(self._mpi.BYTE)
        return done

    def _broken(self, message: _Message, name: str, error: Any) -> PeerError | ProtocolError:
        peer = message.peer
        who, where = self._who(peer), failures.place(self.traffic, name)
        if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            return failures.oversized(peer, who, message.memory.numel(), self.rank, where)
        return failures.broken(peer, who, where, failures.reason(error.Get_error_string()))

    def _too_late(self, message: _Message, name: str) -> PeerError:
        verb, where = "took" if message.leaving else "sent", failures.place(self.traffic, name)
        return failures.silent(message.peer, self._who(message.peer), verb, self._timeout, where)

    def _unlike(self, peer: int, name: str) -> ProtocolError:
        return failures.unlike_entries(peer, self._who(peer), name, self.rank)

    def _who(self, peer: int) -> str:
        return failures.named(peer, self.addresses[peer])


def load_mpi() -> ModuleType:
    """mpi4py's MPI, initialised. Raises `ConfigError` where there is none, or none that many threads may call."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"MPI cannot be used here ({failures.first_line(error)}); install mpi4py ({how_to_install('mpi4py')})"
            " and an MPI library, such as MPICH or Open MPI."
        ) from error
    # Exchanges run on a thread of their own, beside whatever the main thread does with MPI.
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "MPI was initialised for one thread at a time; initialise it with MPI_THREAD_MULTIPLE, as mpi4py does"
            " unless told otherwise."
        )
    return MPI


def leave_mpi() -> None:
    """Finalize MPI if this process has used it: mpiexec takes a process that ends without for a failure."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _abandon(messages: list[_Message]) -> None:
    """Withdraw what can be, and keep the memory of whatever MPI may still be busy with."""
    _abandoned[:] = [message for message in _abandoned if not _is_over(message)]
    for message in messages:
        if message.request:
            if not message.leaving:
                message.request.Cancel()
            _abandoned.append(message)


def _is_over(message: _Message) -> bool:
    """Whether MPI has let go of its memory, as it also does when it fails."""
    try:
        return bool(message.request.Test())
    except RuntimeError:
        return True


def _without(tensors: list[Tensor], position: int) -> list[Tensor]:
    return [*tensors[:position], *tensors[position + 1 :]]
