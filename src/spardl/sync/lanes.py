"""The threads of a session: one communicates, and where there are several groups, one accumulates ahead of it."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

# Backward calls into Python for every gradient while the communication thread works. By default Python lets a thread
# wait 5 ms for its turn, which over a hundred gradients costs more than overlap brings.
SWITCH_INTERVAL_S = 2e-4

# Where ranks share cores, a communication thread would wait for its turn at every message: this many steps of niceness
# put it before backward. Only who may raise priorities (root, CAP_SYS_NICE) gets that.
NICENESS_GAIN = 10


class Asked(Future[Result]):
    """A job without a thread: it is done when somebody asks for what it brings, on the asker's thread."""

    def __init__(self, job: Callable[[], Result]) -> None:
        super().__init__()
        self._job: Callable[[], Result] | None = job

    def settle(self) -> None:
        """Do it, if nobody has."""
        job, self._job = self._job, None
        if job is None:
            return
        try:
            self.set_result(job())
        except BaseException as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Result:
        self.settle()
        return super().result(timeout)


class Lanes:
    """Jobs run in the order in which they were given, on all ranks the same.

    threads  without them a job runs at once, or when somebody asks for what it brings (`defer`): on other devices than
             a CPU it only queues work, on a stream beside the caller's (`aside.py`)
    ahead    whether groups overlap with backward: Python then hands over between threads more often, for the whole
             process, until `stop`
    """

    def __init__(self, *, threads: bool, ahead: bool) -> None:
        first = _go_first if ahead else None
        self._communicator = ThreadPoolExecutor(1, "spardl", first) if threads else None
        self._adder = ThreadPoolExecutor(1, "spardl-adder", first) if ahead and threads else None
        self._asked: Asked[Any] | None = None
        self._interval = sys.getswitchinterval()
        if ahead:
            sys.setswitchinterval(min(self._interval, SWITCH_INTERVAL_S))

    @property
    def run_ahead(self) -> bool:
        """Whether something can be accumulated while another group is exchanged."""
        return self._adder is not None

    def run(self, job: Callable[[], Result]) -> "Future[Result]":
        """Do it on the communication thread, after what was given before."""
        if self._communicator is not None:
            return self._communicator.submit(job)
        self._settle()
        future = Asked(job)
        future.settle()
        return future

    def defer(self, job: Callable[[], Result]) -> "Future[Result]":
        """The same; without a thread, when its result is asked for, or the next job is given."""
        if self._communicator is not None:
            return self._communicator.submit(job)
        self._settle()
        future: Asked[Result] = Asked(job)
        self._asked = future
        return future

    def _settle(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.settle()

    def prepare(self, job: Callable[[], None]) -> "Future[None]":
        """Do it on the other thread; whoever needs it done waits for the future."""
        assert self._adder is not None
        return self._adder.submit(job)

    def stop_preparing(self) -> None:
        """Return when nothing is being prepared."""
        if self._adder is not None:
            self._adder.submit(lambda: None).result()

    def wait(self) -> None:
        """Return when the communication thread has nothing left to do."""
        if self._communicator is not None:
            self._communicator.submit(lambda: None).result()
        self._settle()

    def stop(self) -> None:
        """End the threads, and let Python hand over as it did before."""
        self._settle()
        for pool in (self._communicator, self._adder):
            if pool is not None:
                pool.shutdown(wait=True)
        self._communicator = self._adder = None
        sys.setswitchinterval(self._interval)


def _go_first() -> None:
    """This thread has little to do, and others wait for it: it comes before backward, where the system allows that."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            mine = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, mine, os.getpriority(os.PRIO_PROCESS, mine) - NICENESS_GAIN)
