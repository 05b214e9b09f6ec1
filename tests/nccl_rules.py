"""A process group between threads that refuses what NCCL would refuse, for transports that are to run on NCCL.

* memory of the host, and memory that is not contiguous
* a message whose two sides name different sizes
* a send or a receive outside of a batch: NCCL works them off in order, so two ranks that both begin by receiving hang
* an empty batch, which torch refuses
* a message without a partner: a batch is over when all of it has been sent *and* taken
* collectives in another order, of another size or type than on the other ranks, or between other messages

`installed` puts it in the place of torch.distributed in `transport/torchdist.py` and `transport/members.py`.
"""

import queue
import threading
import types
from collections import defaultdict
from contextlib import contextmanager

import torch.distributed as dist

from far import FAR, FarStream, FarTensor, current_stream
from spardl.transport import members, torchdist

PATIENCE = 100  # seconds, for what would otherwise hang


class Refused(AssertionError):
    """NCCL would refuse this, or hang."""


class Fabric:
    """What the ranks have in common."""

    def __init__(self, workers):
        self.workers = workers
        self.mail = defaultdict(queue.SimpleQueue)
        for pair in ((i, j) for i in range(workers) for j in range(workers)):
            _ = self.mail[pair]
        self.table = [None] * workers
        self.barrier = threading.Barrier(workers)

    def check_nothing_is_left(self):
        left = {pair: box.qsize() for pair, box in self.mail.items() if box.qsize()}
        if left:
            raise Refused(f"messages without a partner: {left}")


class _Done:
    """Work that is over, in NCCL's stream: the caller's has to wait for it. Of messages and sums nobody may wait with a
    deadline: torch would hold the host."""

    def __init__(self, stream, *, patient=True):
        self.patient = patient
        self.event = stream.record_event()

    def wait(self, timeout=None):
        if timeout is not None and self.patient:
            raise Refused("a wait with a deadline, for which torch holds the host")
        current_stream().wait_event(self.event)
        return True

    def is_completed(self):
        return True


class StrictGroup:
    """One rank's end."""

    def __init__(self, fabric, rank):
        self.fabric, self.rank = fabric, rank
        self.collectives = 0
        self.stream = FarStream()  # what is given to NCCL begins when all that was queued before is done

    # --- messages

    def send(self, *_):
        raise Refused("a send outside of a batch")

    def recv(self, *_):
        raise Refused("a receive outside of a batch")

    def batch(self, ops):
        if not ops:
            raise Refused("an empty batch")
        self.stream.wait_event(current_stream().record_event())
        taken = []
        for op in ops:
            _check_memory(op.tensor)
            if op.op is dist.isend:
                self.stream.use([op.tensor], ())
                taken.append(threading.Event())
                self.fabric.mail[self.rank, op.peer].put((op.tensor.raw.clone(), self.collectives, taken[-1]))
        for op in ops:
            if op.op is dist.irecv:
                self._receive(op)
        if not all(event.wait(PATIENCE) for event in taken):
            raise Refused(f"rank {self.rank} sent what nobody received")
        return [_Done(self.stream)]

    def _receive(self, op):
        try:
            sent, collectives, taken = self.fabric.mail[op.peer, self.rank].get(timeout=PATIENCE)
        except queue.Empty:
            raise Refused(f"rank {self.rank} waits for rank {op.peer}, which sends nothing") from None
        taken.set()
        if sent.numel() != op.tensor.numel() or sent.dtype != op.tensor.dtype:
            raise Refused(f"rank {op.peer} sends {sent.numel()} bytes, rank {self.rank} expects {op.tensor.numel()}")
        if collectives != self.collectives:
            raise Refused(f"rank {op.peer} sent this after {collectives} collectives, not {self.collectives}")
        self.stream.use((), [op.tensor])
        op.tensor.raw.copy_(sent)

    # --- collectives

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        versions = self._meet("allreduce", tensor)
        self.stream.use((), [tensor])
        tensor.raw.copy_(sum(versions[1:], versions[0]))
        return _Done(self.stream)

    def allgather(self, outputs, inputs):
        for out, version in zip(outputs[0], self._meet("allgather", inputs[0]), strict=True):
            _check_memory(out)
            self.stream.use((), [out])
            out.raw.copy_(version)
        return _Done(self.stream, patient=False)  # its result is read at once

    def _meet(self, name, tensor):
        _check_memory(tensor)
        self.stream.wait_event(current_stream().record_event())
        self.stream.use([tensor], ())
        self.collectives += 1
        signature = (name, tuple(tensor.shape), tensor.dtype, self.collectives)
        self.fabric.table[self.rank] = (signature, tensor.raw.clone())
        self.fabric.barrier.wait(PATIENCE)
        found = list(self.fabric.table)
        self.fabric.barrier.wait(PATIENCE)
        if any(other != signature for other, _ in found):
            raise Refused(f"ranks are at different collectives: {[other for other, _ in found]}")
        return [version for _, version in found]


def _check_memory(tensor):
    if not isinstance(tensor, FarTensor):
        raise Refused(f"memory of the host: {tensor.device}")
    if not tensor.is_contiguous():
        raise Refused("memory that is not contiguous")


class Unwatched:
    """In the place of a watch: threads of one process need none."""

    def __getattr__(self, name):
        return lambda *_: None


@contextmanager
def installed(monkeypatch, workers):
    """`make(rank)` gives a `TorchTransport` over NCCL's rules, on the thread of that rank."""
    fabric, here = Fabric(workers), threading.local()

    class Op:
        def __init__(self, op, tensor, peer, group):
            self.op, self.tensor, self.peer, self.group = op, tensor, peer, group

    fake = types.SimpleNamespace(
        is_initialized=lambda: True,
        get_rank=lambda: here.rank,
        get_backend=lambda: "nccl",
        get_process_group_ranks=lambda group: list(range(workers)),
        group=types.SimpleNamespace(WORLD=None),
        new_group=lambda *args, **kwargs: StrictGroup(fabric, here.rank),
        AllreduceOptions=dist.AllreduceOptions,
        ProcessGroup=dist.ProcessGroup,
        P2POp=Op,
        isend=dist.isend,
        irecv=dist.irecv,
        batch_isend_irecv=lambda ops: ops[0].group.batch(ops) if ops else StrictGroup(fabric, 0).batch(ops),
    )

    def make(rank):
        here.rank = rank
        return torchdist.TorchTransport(timeout=PATIENCE, device=FAR)

    with monkeypatch.context() as patch:
        patch.setattr(torchdist, "dist", fake)
        patch.setattr(members, "dist", fake)
        patch.setattr(members._torch_private, "default_store", lambda: None)
        patch.setattr(torchdist, "Meeting", lambda members, timeout: types.SimpleNamespace(place=None))
        patch.setattr(torchdist, "Watch", lambda rank: Unwatched())
        patch.setattr(torchdist, "within", lambda seconds, job, late: job())  # on the thread that is this rank
        yield make
        fabric.check_nothing_is_left()
