"""The driver: clocks, counters, the order of what happens, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.collectives.methods.dense import ring_all_reduce
from spardl.collectives.program import AllReduce, Message, Round, Team
from spardl.errors import ProtocolError
from spardl.memory.layout import BlockLayout
from spardl.simulator.computing import Costs, Machine
from spardl.simulator.driver import Driver, Join, Start, Work
from spardl.simulator.network import Link, Network
from stores import Store

examples = settings(deadline=None)


def message(peer, size):
    return Message(peer, np.zeros(size, np.uint8), size)


def test_a_message_takes_latency_plus_size_over_bandwidth():
    def program(rank):
        yield Round([message(1 - rank, 1000)], [(1 - rank, 1000)], "swap")

    driver = Driver(Network.switch(2, latency=0.5, bandwidth=1000))
    driver.run([program(0), program(1)])
    assert driver.clocks == [1.5, 1.5]
    assert [t.bytes_sent for t in driver.traffic] == [t.bytes_received for t in driver.traffic] == [1000, 1000]


def test_messages_of_one_round_share_the_links():
    """Two messages that leave together have half the line each, and two that arrive together too."""

    def hub():
        yield Round([message(1, 100), message(2, 100)], [(1, 100), (2, 100)], "hub")

    def spoke():
        yield Round([message(0, 100)], [(0, 100)], "spoke")

    driver = Driver(Network.switch(3, latency=0.0, bandwidth=100))
    driver.run([hub(), spoke(), spoke()])
    assert driver.clocks == [2.0, 2.0, 2.0]


def test_a_late_sender_delays_its_receiver():
    def first():
        yield Round([message(1, 100)], [], "early")

    def second():
        yield Round([], [(0, 100)], "wait")
        yield Round([message(2, 100)], [], "pass on")

    def third():
        yield Round([], [(1, 100)], "wait")

    driver = Driver(Network.switch(3, latency=1.0, bandwidth=100))
    driver.run([first(), second(), third()])
    assert driver.clocks == [1.0, 3.0, 4.0]


def test_an_all_reduce_costs_what_a_ring_costs():
    tensors = [torch.full((8,), float(rank)) for rank in range(4)]

    def program(rank):
        yield AllReduce(tensors[rank])

    driver = Driver(Network.switch(4, latency=1.0, bandwidth=32))
    driver.run([program(rank) for rank in range(4)])
    assert all(torch.equal(tensor, torch.full((8,), 6.0)) for tensor in tensors)
    assert driver.time == 6 * 1.0 + 1.5 * 32 / 32
    assert {(t.rounds, t.bytes_sent) for t in driver.traffic} == {(6, 48)}


def test_programs_that_wait_for_each_other_are_told_so():
    def program(rank):
        yield Round([], [(1 - rank, 10)], "hopeless")

    with pytest.raises(ProtocolError, match="rank 0 in hopeless for 1; rank 1 in hopeless for 0"):
        Driver(Network.switch(2)).run([program(0), program(1)])


def test_a_message_over_its_capacity_is_refused():
    def program(rank):
        yield Round([message(1 - rank, 11)], [(1 - rank, 10)], "swap")

    with pytest.raises(ProtocolError, match="sent 11 bytes"):
        Driver(Network.switch(2)).run([program(0), program(1)])


def test_a_round_without_messages_takes_no_time():
    def program():
        return (yield Round([], [], "nothing"))

    driver = Driver(Network.switch(1, latency=1.0, bandwidth=1))
    assert driver.run([program()]) == [[]]
    assert driver.clocks == [0.0]


@pytest.mark.parametrize("receive", [[1, 2], [2, 1]])
def test_a_late_message_does_not_delay_one_that_came_before(receive):
    """Rank 1's message leaves after 9 s; rank 2's has long been received then, in whatever order rank 0 names them."""

    def hub():
        yield Round([], [(peer, 100) for peer in receive], "both")

    def late():
        yield Round([message(3, 900)], [], "before")
        yield Round([message(0, 100)], [], "late")

    def early():
        yield Round([message(0, 100)], [], "early")

    def other():
        yield Round([], [(1, 900)], "before")

    driver = Driver(Network.switch(4, bandwidth=100))
    driver.run([hub(), late(), early(), other()])
    assert driver.clocks == [10.0, 10.0, 1.0, 9.0]


def test_a_receivers_link_is_shared_by_messages_of_different_rounds():
    """Both messages share rank 0's line, whether it asks for them now, later or never; clocks go on from run to run."""

    def hub():
        yield Round([], [(1, 100)], "first")
        yield Round([], [(2, 100)], "second")

    def spoke():
        yield Round([message(0, 100)], [], "spoke")

    def idle():
        return
        yield

    driver = Driver(Network.switch(3, bandwidth=100))
    driver.run([hub(), spoke(), spoke()])
    assert driver.clocks == [2.0, 2.0, 2.0]
    driver.run([idle(), spoke(), spoke()])
    assert driver.clocks == [2.0, 4.0, 4.0]


def test_messages_of_one_peer_are_received_in_the_order_of_sending():
    def sender():
        yield Round([message(1, 1)], [], "first")
        yield Round([message(1, 2)], [], "second")

    def receiver():
        first = yield Round([], [(0, 2)], "first")
        second = yield Round([], [(0, 2)], "second")
        return [len(received) for received in first + second]

    assert Driver(Network.switch(2, latency=1.0)).run([sender(), receiver()])[1] == [1, 2]


def test_work_that_can_be_done_meanwhile_is_done_once():
    done = []

    def program(rank):
        yield Round([message(1 - rank, 1)], [(1 - rank, 1)], "swap", lambda: done.append(rank))

    Driver(Network.switch(2)).run([program(0), program(1)])
    assert sorted(done) == [0, 1]


def test_ranks_that_wait_for_an_all_reduce_are_named():
    def program(rank):
        if rank:
            yield AllReduce(torch.zeros(1), "diagnosis")

    with pytest.raises(ProtocolError, match="rank 1 in diagnosis for all; rank 2 in diagnosis for all"):
        Driver(Network.switch(3)).run([program(rank) for rank in range(3)])


class Bus(Network):
    """All hosts on one cable, which all messages share."""

    def __init__(self, workers, *, latency, bandwidth):
        self.workers = workers
        self.cable = Link(bandwidth, latency)

    def path(self, source, target):
        return (self.cable,)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("topology,latency", [(Network.switch, 1e-3), (Bus, 0.0)])
def test_an_all_reduce_takes_as_long_as_the_ring_program(topology, latency, workers):
    tensors = [torch.ones(workers * 10) for _ in range(workers)]

    def whole(rank):
        yield AllReduce(tensors[rank])

    def ring(rank):
        frames = Store(BlockLayout.contiguous(1, 1)).memory.frames
        yield from ring_all_reduce(Team(tuple(range(workers)), rank), frames, tensors[rank])

    times = []
    for program in (whole, ring):
        driver = Driver(topology(workers, latency=latency, bandwidth=1e6))
        driver.run([program(rank) for rank in range(workers)])
        times.append(driver.time)
    assert times[0] == pytest.approx(times[1], rel=1e-12)


class Pairs(Network):
    """Hosts on a switch with a wire of its own between each two: no two ways are equally long."""

    def __init__(self, workers):
        self.workers = workers
        self.up = [Link(100 + rank / 7) for rank in range(workers)]
        self.down = [Link(90 + rank / 11) for rank in range(workers)]
        self.wire = [[Link(latency=(1 + a * workers + b) ** 0.5) for b in range(workers)] for a in range(workers)]

    def path(self, source, target):
        return self.up[source], self.wire[source][target], self.down[target]


class Renamed(Network):
    """The hosts of another network under other numbers."""

    def __init__(self, network, number_of):
        self.workers = network.workers
        self.network = network
        self.host = {number: host for host, number in enumerate(number_of)}

    def path(self, source, target):
        return self.network.path(self.host[source], self.host[target])


WORKERS = 5
PAIRS = list(itertools.permutations(range(WORKERS), 2))

# Rounds in which all ranks take part: the sizes of messages by sender and receiver.
exchanges = st.lists(st.dictionaries(st.sampled_from(PAIRS), st.integers(0, 500), max_size=12), min_size=1, max_size=4)


def programs(rounds, *, sends=sorted, receives=sorted):
    """One program per rank for these rounds, which name peers in the orders given; each returns what sizes it got."""

    def program(rank):
        sizes = []
        for number, messages in enumerate(rounds):
            targets = sends([b for a, b in messages if a == rank])
            sources = receives([a for a, b in messages if b == rank])
            send = [message(peer, messages[rank, peer]) for peer in targets]
            frames = yield Round(send, [(peer, messages[peer, rank]) for peer in sources], f"round {number}")
            sizes.append({peer: len(received) for peer, received in zip(sources, frames, strict=True)})
        return sizes

    return [program(rank) for rank in range(WORKERS)]


def shuffled(random):
    return lambda peers: random.sample(sorted(peers), len(peers))


@examples
@given(rounds=exchanges, random=st.randoms(use_true_random=False), latency=st.sampled_from([0.0, 0.5, 0.3]))
def test_the_order_of_receiving_changes_neither_time_nor_traffic(rounds, random, latency):
    drivers = [Driver(Network.switch(WORKERS, latency=latency, bandwidth=100)) for _ in range(2)]
    plain = drivers[0].run(programs(rounds))
    mixed = drivers[1].run(programs(rounds, receives=shuffled(random)))
    assert plain == mixed
    assert drivers[0].clocks == drivers[1].clocks
    assert drivers[0].traffic == drivers[1].traffic


@examples
@given(rounds=exchanges, random=st.randoms(use_true_random=False))
def test_the_order_of_sending_does_not_matter(rounds, random):
    """Messages of a round begin together."""
    drivers = [Driver(Network.switch(WORKERS, latency=0.3, bandwidth=100)) for _ in range(2)]
    drivers[0].run(programs(rounds))
    drivers[1].run(programs(rounds, sends=shuffled(random)))
    assert drivers[0].clocks == pytest.approx(drivers[1].clocks)


@examples
@given(rounds=exchanges, numbers=st.permutations(range(WORKERS)))
def test_the_order_in_which_ranks_are_driven_does_not_change_their_clocks(rounds, numbers):
    """Ranks start in the order of their numbers; under other numbers the same hosts take as long."""
    network = Pairs(WORKERS)
    driver, other = Driver(network), Driver(Renamed(network, numbers))
    renamed = [{(numbers[a], numbers[b]): size for (a, b), size in messages.items()} for messages in rounds]
    driver.run(programs(rounds, sends=list))
    other.run(programs(renamed, sends=list))
    assert [other.clocks[numbers[rank]] for rank in range(WORKERS)] == pytest.approx(driver.clocks)


@examples
@given(rounds=exchanges, latency=st.sampled_from([0.0, 0.5, 0.3]))
def test_no_rank_is_done_before_its_links_can_have_carried_its_messages(rounds, latency):
    driver = Driver(Network.switch(WORKERS, latency=latency, bandwidth=100))
    driver.run(programs(rounds))
    for rank, clock in enumerate(driver.clocks):
        sent = [size for messages in rounds for (a, _), size in messages.items() if a == rank]
        received = [size for messages in rounds for (_, b), size in messages.items() if b == rank]
        assert clock >= sum(sent) / 100 * (1 - 1e-12)
        if received:
            assert clock >= (latency + sum(received) / 100) * (1 - 1e-12)


@examples
@given(shifts=st.lists(st.integers(1, WORKERS - 1), min_size=1, max_size=6), size=st.integers(0, 500))
def test_messages_that_share_no_link_take_latency_and_size_over_bandwidth_each(shifts, size):
    """In each round every rank sends one message and receives one, so no link has two at a time."""
    driver = Driver(Network.switch(WORKERS, latency=0.25, bandwidth=64))
    driver.run(programs([{(rank, (rank + shift) % WORKERS): size for rank in range(WORKERS)} for shift in shifts]))
    assert driver.clocks == pytest.approx([len(shifts) * (0.25 + size / 64)] * WORKERS)


@examples
@given(rounds=exchanges)
def test_what_is_sent_is_received(rounds):
    driver = Driver(Network.switch(WORKERS, latency=0.5, bandwidth=100))
    got = driver.run(programs(rounds))
    for rank, traffic in enumerate(driver.traffic):
        sent = [size for messages in rounds for (a, _), size in messages.items() if a == rank]
        assert (traffic.rounds, traffic.messages, traffic.bytes_sent) == (len(rounds), len(sent), sum(sent))
        assert traffic.bytes_received == sum(size for sizes in got[rank] for size in sizes.values())
    assert sum(t.bytes_sent for t in driver.traffic) == sum(t.bytes_received for t in driver.traffic)


def test_work_takes_time_and_longer_on_a_slower_rank():
    def program():
        yield Work(2.0, "forward")

    driver = Driver(Network.switch(3), Machine(slower={1: 4.0}))
    driver.run([program() for _ in range(3)])
    assert driver.clocks == [2.0, 8.0, 2.0]


def test_ranks_that_share_cores_compute_one_after_the_other():
    def program():
        yield Work(1.0, "forward")

    driver = Driver(Network.switch(5), Machine(cores=2))
    driver.run([program() for _ in range(5)])
    assert driver.clocks == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_lane_runs_beside_the_program_that_started_it_and_after_the_one_before():
    """Two exchanges of 1 s each, begun at 1 s and at 1.5 s, take until 3 s; computing goes on meanwhile."""

    def exchange(rank):
        yield Round([message(1 - rank, 100)], [(1 - rank, 100)], "swap")
        return rank

    def program(rank):
        yield Work(1.0, "backward")
        first = yield Start(exchange(rank))
        yield Work(0.5, "backward")
        second = yield Start(exchange(rank), after=first)
        yield Work(0.5, "optimizer")
        assert (yield Join(first)) == (yield Join(second)) == rank

    driver = Driver(Network.switch(2, bandwidth=100), watched=[0])
    driver.run([program(0), program(1)])
    assert driver.clocks == [3.0, 3.0]
    assert [(span.name, span.start, span.end) for span in driver.spans] == [
        ("backward", 0.0, 1.0),
        ("backward", 1.0, 1.5),
        ("optimizer", 1.5, 2.0),
        ("swap", 1.0, 2.0),
        ("swap", 2.0, 3.0),
    ]


def test_rounds_and_bytes_cost_their_hosts_what_they_are_said_to():
    """0.5 s for the round, 1 s for 100 bytes to send, 1 s on the line, 1 s for 100 bytes that were received."""

    def program(rank):
        yield Round([message(1 - rank, 100)], [(1 - rank, 100)], "swap")

    driver = Driver(Network.switch(2, bandwidth=100), Machine(Costs(per_round=0.5, per_byte=0.01)))
    driver.run([program(0), program(1)])
    assert driver.clocks == pytest.approx([3.5, 3.5])
