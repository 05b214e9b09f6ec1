"""Libraries that know no deadline get one; a store that does not answer is told by whose it is and what it does."""

import os
import socket
import subprocess
import sys
import threading

import pytest
from torch.distributed import PrefixStore, TCPStore

from spardl.transport.patience import store_is_silent, within


def test_what_a_job_returns_or_raises_comes_through() -> None:
    assert within(60, lambda: 7, RuntimeError) == 7
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0, RuntimeError)


def test_a_job_that_takes_too_long_is_left_alone() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="too late"):
        within(0.01, never.wait, lambda: TimeoutError("too late"))
    never.set()


LATE = """
import time
from spardl.transport.patience import within
try:
    within(0.01, lambda: time.sleep(0.2) or print("came back"), lambda: TimeoutError("too late"))
except TimeoutError as error:
    print(error)
"""


def test_a_process_ends_after_a_job_that_is_a_little_late() -> None:
    """One that comes back from torch while Python ends would abort the process: exit code 134, whatever was said."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "too late\ncame back\n"), done.stderr


class Elsewhere:
    """A store whose server is said to be there."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port


def test_a_store_that_takes_calls_and_does_not_answer_is_stopped() -> None:
    """The kernel takes calls for a process that is stopped, as it does for one that never looks at them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = store_is_silent(Elsewhere(*silent.getsockname()), 2, 5.0)
    assert error.peer == 0
    assert str(error).endswith("did not answer for 5 s; its process is stopped or hangs.")


def test_a_store_where_nobody_listens_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = probe.getsockname()
    error = store_is_silent(Elsewhere(*place), 2, 5.0)
    assert error.peer == 0 and error.candidates == (0, 2)
    assert "rank 0, which keeps the store at 127.0.0.1:" in str(error) and "is gone" in str(error)


def test_the_store_of_a_launcher_is_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = store_is_silent(Elsewhere(*silent.getsockname()), 2, 5.0)
    assert error.peer is None and str(error).startswith("the launcher, which keeps the store at ")


def test_the_server_behind_a_store_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    uv = os.environ.get("USE_LIBUV", "1") == "1"
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=uv)
    assert f"127.0.0.1:{port}, did not answer" in str(
        store_is_silent(PrefixStore("a", PrefixStore("b", store)), 1, 3.0)
    )
