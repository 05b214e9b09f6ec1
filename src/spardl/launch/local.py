"""Local workers: the same command once per rank, watched over until all are done or one has failed."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from spardl.errors import ConfigError
from spardl.launch.lifeline import VARIABLE, Failure
from spardl.launch.place import LISTENER

HOST = "127.0.0.1"
LOOPBACK = "lo"

# After a failure: how long the others may take to say why, and then to end when asked to.
HEARING_S = 1.0
ENDING_S = 3.0
_HINTS: dict[int, str] = {
    signal.SIGILL: " Its processor lacks an instruction that it announces; spardl doctor says what to set.",
}


class Interrupted(Exception):
    """The launcher was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}.")
        self.number = number


@dataclass
class Worker:
    """One rank's process and our end of its line."""

    rank: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    report: bytearray = field(default_factory=bytearray)

    def listen(self) -> bool:
        """Take in what it says; False once it has ended."""
        try:
            heard = self.line.recv(65536)
        except ConnectionResetError:
            heard = b""
        self.report += heard
        return bool(heard)

    def failure(self) -> Failure | None:
        """Why it failed, or None if it ended well. Call it when it has ended."""
        code = self.process.wait()
        if code == 0:
            return None
        if code < 0:
            return Failure(f"rank {self.rank} was killed by {signal.Signals(-code).name}.{_HINTS.get(-code, '')}")
        reported = Failure.from_report(bytes(self.report))
        return reported or Failure(f"rank {self.rank} ended with exit code {code} and without a word.")


def launch(
    command: Sequence[str],
    workers: int,
    say: Callable[[str], None],
    *,
    port: int | None = None,
    patience: float = 0.0,
) -> int:
    """Run `command` as `workers` ranks on this machine; return the exit code for all of them.

    One rank's failure ends all within seconds and is told once: `say` is given each sentence that is for a person.
    However the launcher ends, no worker outlives it. Asked to stop, it passes that on and gives them `patience` seconds
    to save, unless it is asked once more. The store of rank 0 listens at `port`, or at one that is free.
    """
    crew: list[Worker] = []
    with _on_signals(signal.SIG_IGN):  # but for the stretches in which they count
        try:
            with _on_signals(_interrupt), _listener(port) as listener:
                for rank in range(workers):
                    crew.append(_start(command, rank, workers, listener))
                listener.close()
                failure = _watch_over(crew)
        except Interrupted as interruption:
            failure = _wind_down(crew, interruption, patience, say)
        finally:
            _end(crew)
        if failure is None:
            return 0
        say(failure.text)
        return failure.code


def _start(command: Sequence[str], rank: int, workers: int, listener: socket.socket) -> Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        inherited = [theirs.fileno(), *([listener.fileno()] if rank == 0 else [])]
        process = subprocess.Popen(
            command,
            env=_environment(os.environ, rank, workers, listener, theirs),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            # A session of its own: Ctrl-C reaches the launcher alone, which then ends the workers in good order.
            start_new_session=True,
        )
    return Worker(rank, process, ours)


def _environment(
    environment: Mapping[str, str], rank: int, workers: int, listener: socket.socket, line: socket.socket
) -> dict[str, str]:
    host, port = listener.getsockname()
    defaults = {"OMP_NUM_THREADS": "1"}
    if any(name == LOOPBACK for _, name in socket.if_nameindex()):
        defaults["GLOO_SOCKET_IFNAME"] = LOOPBACK
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        VARIABLE: str(line.fileno()),
    }
    if rank == 0:
        place[LISTENER] = str(listener.fileno())
    return {**defaults, **environment, **place}


@contextlib.contextmanager
def _listener(port: int | None) -> Iterator[socket.socket]:
    """A socket that listens for the store of rank 0, which inherits it: nobody else can take the port in between."""
    try:
        listener = socket.create_server((HOST, port or 0), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used ({error.strerror}); choose another, or leave --port out."
        ) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _on_signals(action: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Do this when a signal asks for an end."""
    before = {number: signal.signal(number, action) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _wind_down(
    crew: Sequence[Worker], interruption: Interrupted, patience: float, say: Callable[[str], None]
) -> Failure | None:
    """Let the workers stop in good order, if they can."""
    stopped = Failure(str(interruption), code=128 + interruption.number)
    if not patience:
        return stopped
    say("saving, to stop after this step; once more ends it at once.")
    try:
        with _on_signals(_interrupt):
            for worker in crew:
                if worker.process.poll() is None:
                    worker.process.send_signal(interruption.number)
            failure = _watch_over(crew, patience)
    except Interrupted as again:
        return Failure(f"{str(again).rstrip('.')} before it was saved.", code=128 + again.number)
    # A worker that had not begun has nothing to save, and ends by the signal itself.
    by_signal = any(worker.process.poll() == -interruption.number for worker in crew)
    return stopped if by_signal else failure


def _watch_over(crew: Sequence[Worker], patience: float | None = None) -> Failure | None:
    """Wait until all have ended well, or until one has failed and the others had their time to say why.

    With `patience`, all were asked to end: wait so long for every one.
    """
    failures: list[Failure] = []
    deadline = None if patience is None else time.monotonic() + patience
    with selectors.DefaultSelector() as selector:
        for worker in crew:
            selector.register(worker.line, selectors.EVENT_READ, worker)
        while selector.get_map():
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = selector.select(remaining)
            if not events and deadline is not None:
                break
            for key, _ in events:
                worker = key.data
                if worker.listen():
                    continue
                selector.unregister(worker.line)
                failure = worker.failure()
                if failure is not None:
                    failures.append(failure)
            if failures and deadline is None:
                deadline = time.monotonic() + HEARING_S
            if patience is None and any(not failure.echo for failure in failures):
                break
    return min(failures, key=lambda failure: failure.echo, default=None)


def _end(crew: Sequence[Worker]) -> None:
    """See to it that no worker is left."""
    running = [worker.process for worker in crew if worker.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + ENDING_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for worker in crew:
        worker.line.close()
