"""Jobs keep their order; what is prepared runs beside them; threads that communicate come before backward."""

import os
import sys
import threading

import pytest

from spardl.sync.lanes import NICENESS_GAIN, Lanes


@pytest.fixture(autouse=True)
def same_switch_interval():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("threads", [False, True])
def test_jobs_run_in_the_order_in_which_they_were_given(threads: bool) -> None:
    """Also if the first one takes so long that all the others are waiting when it ends."""
    lanes, done, all_given = Lanes(threads=threads, ahead=False), [], threading.Event()
    if not threads:
        all_given.set()
    for number in range(5):
        lanes.run(lambda number=number: (all_given.wait(30), done.append(number)))
    all_given.set()
    lanes.wait()
    assert done == [0, 1, 2, 3, 4]
    assert not lanes.run_ahead


def test_something_is_prepared_while_a_job_waits() -> None:
    lanes, order = Lanes(threads=True, ahead=True), []
    ready = threading.Event()
    lanes.run(lambda: (ready.wait(10), order.append("exchanged")))
    added = lanes.prepare(lambda: (order.append("prepared"), ready.set()))
    added.result()
    lanes.wait()
    assert order == ["prepared", "exchanged"]


def test_when_preparing_has_stopped_nothing_is_under_way() -> None:
    lanes, order, may_end = Lanes(threads=True, ahead=True), [], threading.Event()
    lanes.prepare(lambda: (may_end.wait(30), order.append("prepared")))
    stopping = threading.Thread(target=lambda: (lanes.stop_preparing(), order.append("stopped")))
    stopping.start()
    stopping.join(0.1)  # for as long as it may take one that does not wait to come to its end
    may_end.set()
    stopping.join()
    assert order == ["prepared", "stopped"]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may raise a thread's priority")
@pytest.mark.parametrize("ahead", [False, True])
def test_threads_that_overlap_with_backward_come_before_it(ahead: bool) -> None:
    """And no other thread of the process is touched."""
    base, found = os.getpriority(os.PRIO_PROCESS, 0), []
    lanes = Lanes(threads=True, ahead=ahead)
    lanes.run(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    lanes.wait()
    assert found == [max(-20, base - NICENESS_GAIN) if ahead else base]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == base
