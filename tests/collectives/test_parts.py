"""The pieces of SparDL: schedules, Bruck's all-gather, the controller of B-SAG."""

import numpy as np
import pytest
import torch

from spardl import host
from spardl.collectives.balance import join
from spardl.collectives.bruck import gather_blocks
from spardl.collectives.method import Seat
from spardl.collectives.methods.oktopk import OkTopk
from spardl.collectives.partition import MEMORY, Partition
from spardl.collectives.price import Price
from spardl.collectives.program import Ask, Team, side_by_side
from spardl.collectives.reduce_scatter import schedule
from spardl.collectives.snapshot import Snapshot
from spardl.collectives.team_gather import TopController
from spardl.errors import ProtocolError, StateError
from spardl.memory.layout import BlockLayout
from spardl.simulator.driver import Driver
from spardl.simulator.network import Network
from spardl.sparse import SparseBlocks
from stores import Store


@pytest.mark.parametrize("size", range(1, 65))
def test_every_contribution_reaches_its_owner_once(size):
    """What one member sends, another expects; after the last round each block's parts all lie with its owner."""
    held = [{(worker, block) for block in range(size)} for worker in range(size)]
    for step in zip(*(list(schedule(size, p)) for p in range(size)), strict=True):
        moved = []
        for p, (gap, sent, _) in enumerate(step):
            to = (p + gap) % size
            assert sorted(sent) == sorted(step[to][2]), "the receiver expects other blocks"
            going = {(w, b) for w, b in held[p] if b in sent}
            held[p] -= going
            moved.append((to, going))
        for to, going in moved:
            assert not held[to] & going
            held[to] |= going
    for p in range(size):
        assert held[p] == {(worker, p) for worker in range(size)}


def test_the_schedule_of_six_workers_is_the_papers():
    assert [(gap, list(sent), list(got)) for gap, sent, got in schedule(6, 0)] == [
        (4, [4, 5], [0, 1]),
        (2, [2, 3], [0, 1]),
        (1, [1], [0]),
    ]
    assert [(gap, list(sent)) for gap, sent, _ in schedule(5, 3)] == [(4, [2]), (2, [0, 1]), (1, [4])]


@pytest.mark.parametrize("size", range(1, 18))
def test_bruck_gathers_every_block_in_member_order(size):
    """Ceil(log2 m) rounds, m - 1 blocks sent by each."""
    layout = BlockLayout.contiguous(10 * size, size)
    frames = [Store(layout, values="fp32").memory.frames for _ in range(size)]
    network = Driver(Network.switch(size))

    def program(p):
        indices = torch.tensor([p % 10], dtype=torch.int32)
        mine = SparseBlocks(np.array([p]), np.array([1]), indices, torch.tensor([float(p + 1)]))
        team, budgets = Team(tuple(range(size)), p), np.full(size, 2)
        return gather_blocks(team, frames[p], frames[p].code(mine), np.arange(size), budgets)

    for blocks in network.run([program(p) for p in range(size)]):
        assert [int(block.ids[0]) for block in blocks] == list(range(size))
        assert [float(block.decode().values[0]) for block in blocks] == [p + 1.0 for p in range(size)]
    for each, traffic in zip(frames, network.traffic, strict=True):
        assert each.account.entries == size - 1
        assert traffic.rounds == (size - 1).bit_length()


def follow(controller, union_of, steps):
    sizes = []
    for _ in range(steps):
        controller.observe(union_of(controller.size))
        sizes.append(controller.size)
    return sizes


def test_the_controller_settles_where_the_union_fills_the_budget():
    """Seven teams that agree on much: the offer grows from budget / d until the union is the budget."""
    controller = TopController(teams=7, length=100_000)
    controller.begin(2000)
    assert controller.size == 285
    sizes = follow(controller, lambda h: int(3.1 * h), 80)
    assert all(abs(3.1 * h - 2000) < 600 for h in sizes[50:])
    assert abs(np.mean(sizes[50:]) * 3.1 - 2000) < 200


@pytest.mark.parametrize("budget", [1, 2, 5, 40, 99])
def test_the_controller_moves_for_small_blocks_and_stays_in_bounds(budget):
    """The released code froze below a hundred entries and had no ceiling."""
    controller = TopController(teams=4, length=100_000)
    controller.begin(budget)
    sizes = follow(controller, lambda h: h, 60)
    assert max(sizes) == budget
    sizes = follow(controller, lambda h: 4 * h + 1, 60)
    assert min(sizes) == max(1, budget // 4)


def test_the_controller_keeps_its_share_when_the_budget_changes():
    controller = TopController(teams=4, length=100_000)
    controller.begin(1000)
    follow(controller, lambda h: h, 100)
    assert controller.size == 1000
    controller.begin(100)
    assert controller.size == 100
    resumed = TopController(teams=4, length=100_000)
    resumed.load_state_dict(Snapshot("SparDL", controller.state_dict()))
    assert resumed == controller
    for wrong in ({"size": 101}, {"budget": 100_001}, {"stride": float("nan")}, {"inertia": 1}):
        with pytest.raises(StateError, match="cannot be SparDL's here"):
            resumed.load_state_dict(Snapshot("SparDL", {**controller.state_dict(), **wrong}))
    assert resumed == controller


def test_a_budget_of_the_whole_block_is_offered_whole():
    controller = TopController(teams=4, length=50)
    controller.begin(50)
    assert controller.size == 50
    assert follow(controller, lambda h: 50, 10) == [50] * 10


@pytest.mark.parametrize("wrong", [[3, 9], [7, 8]], ids=["overlapping", "double"])
def test_slices_that_do_not_follow_each_other_are_refused(wrong):
    """Each is in order by itself, which its frame has been checked for; together they would not be."""

    def piece(indices):
        places = torch.tensor(indices, dtype=torch.int32)
        return SparseBlocks(np.array([0]), np.array([len(indices)]), places, torch.ones(len(indices)))

    team, memory = Team((4, 5, 6), 0), Store(BlockLayout.contiguous(10, 1), values="fp32").memory
    fine = join(team, memory, {2: piece([8, 9]), 0: piece([1, 7]), 1: piece([])})
    assert fine.indices.tolist() == [1, 7, 8, 9] and fine.counts.tolist() == [4]
    with pytest.raises(ProtocolError, match=r"^rank 6 sent entries of another rank's slice") as caught:
        join(team, memory, {2: piece(wrong), 0: piece([1, 7]), 1: piece([])})
    assert caught.value.peer == 6


@pytest.mark.parametrize("claimed", [2**31 - 1, -(2**31) + 1])
def test_boundaries_that_a_peer_makes_up_stay_within_the_vector(claimed):
    """Ok-Topk averages what all ranks want; a lie makes poor regions, and no others."""
    length = 90
    memory = Store(BlockLayout.contiguous(length, 1), values="fp32").memory
    method = OkTopk(Seat(0, 3, length))
    program = method._repartition(memory, memory.nothing(np.array([0])))
    operation = next(program)
    with pytest.raises(StopIteration):
        while True:
            ((_, size),) = operation.receive
            operation = program.send([torch.from_numpy(np.full(size // 4, claimed, np.int32).view(np.uint8))])
    assert (np.diff(method.bounds) >= 0).all() and method.bounds[0] == 0 and method.bounds[-1] == length


def test_programs_side_by_side_are_asked_for_at_once(monkeypatch):
    """Each goes on as far as it can, in order; the host reads as often as the one that asks most often."""
    reads = []
    monkeypatch.setattr(host, "download", lambda numbers: reads.append(len(numbers)) or numbers.numpy())

    def program(name, asks):
        yield f"{name} begins"
        for i in range(asks):
            found = yield Ask(torch.arange(i, i + 2))
            yield f"{name} has {found.tolist()}"

    order = list(side_by_side([program("a", 2), program("b", 0), program("c", 1)]))
    assert order == ["a begins", "b begins", "c begins", "a has [0, 1]", "c has [0, 1]", "a has [1, 2]"]
    assert reads == [4, 2]


def test_a_price_is_printed_and_computed_from_one_formula():
    price = Price("2*k*(P-1)/P + ceil(log2(P/d))", "3*n")
    assert str(price) == "2 k (P-1)/P + ceil(log2 P/d) to 3 n"
    assert price.range(P=8, d=2, n=5, k=4) == (2 * 4 * 7 / 8 + 2, 15)
    assert Price("ceil(log2(P))").range(P=1) == (0, 0)


@pytest.mark.parametrize("wrong", [-1.0, 1e300, float("nan"), "many"])
def test_a_histogram_that_no_selections_can_have_made_is_refused(wrong):
    """Blocks would be shared out by it. A right one, however long the run, is taken."""
    partition = Partition(10_000, 4, "prefix")
    for _ in range(500):
        partition.histogram = MEMORY * partition.histogram + partition.block
    state = partition.state_dict()
    partition.load_state_dict(Snapshot("ExDyna", state))
    state["histogram"][1] = wrong
    with pytest.raises(StateError, match=r"cannot be ExDyna's here: histogram are not"):
        partition.load_state_dict(Snapshot("ExDyna", state))
