"""The accumulator is the residual: nothing is lost, a failed step never happened, a policy keeps what it says."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effort import tries
from spardl.kernels.cpu.crew import Crew
from spardl.memory.layout import BlockLayout
from spardl.memory.velocity import Momentum
from spardl.sparse import SparseBlocks
from stores import Store

CREWS = {size: Crew(size) for size in (1, 2, 3)}
POLICIES = ("carry", "return", "partial", "local")
seeds = st.integers(0, 2**32 - 1)
layouts = st.builds(BlockLayout, length=st.integers(1, 120), count=st.integers(1, 5), chunk=st.integers(1, 12))
examples = tries(80)


def numbers(length, seed):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(length).astype(np.float32) ** 3)


def same_bits(left, right):
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def some_entries(layout, random, share=0.3):
    """Random values at random places of all blocks."""
    chosen = (random.random(layout.length) < share).nonzero()[0]
    owners = np.searchsorted(layout.starts, chosen, side="right") - 1
    return SparseBlocks(
        np.arange(layout.count),
        np.bincount(owners, minlength=layout.count).astype(np.int64),
        torch.from_numpy((chosen - layout.starts[owners]).astype(np.int32)),
        numbers(len(chosen), random.integers(2**32)),
    )


def some_take(acc, random):
    """Entries out of some blocks, by any of the verbs that take."""
    layout = acc.layout
    verb = random.integers(5)
    if verb == 0:
        ids = np.sort(random.choice(layout.count, random.integers(1, layout.count + 1), replace=False))
        return acc.take_largest(ids, random.integers(0, layout.lengths[ids] + 2))
    if verb == 1:
        return acc.take_above(int(random.integers(layout.count)), float(random.random()), int(random.integers(9)))
    if verb == 2:
        return acc.take_largest_of_all(int(random.integers(layout.length + 2)))
    if verb == 3:
        return acc.take_above_of_all(float(random.random()), int(random.integers(30)))
    support = some_entries(layout, random)
    return SparseBlocks(support.ids, support.counts, support.indices, acc.take_at(support))


def wreck(acc, random, moves=4):
    """What a collective may do to memory: takes and gifts in any order."""
    for _ in range(moves):
        if random.random() < 0.5:
            some_take(acc, random)
        else:
            acc.give_back(some_entries(acc.layout, random))


# --- adding later ----


@pytest.mark.parametrize("with_momentum", [False, True], ids=["plain", "momentum"])
@given(layout=layouts, seed=seeds, tensors=st.integers(1, 3), threads=st.sampled_from([1, 2, 3]))
@examples
def test_blocks_that_are_added_later_end_as_if_all_were_added_at_once(with_momentum, layout, seed, tensors, threads):
    """Whatever is taken and given back in between; the gradients' memory holds the same old residuals as well."""
    cuts = [layout.length * part // tensors for part in range(tensors + 1)]
    outcomes = []
    for later in (False, True):
        random = np.random.default_rng(seed)
        acc = Store(layout, momentum=with_momentum, crew=CREWS[threads])
        for step in range(3):
            gradients = [numbers(stop - first, seed + step + first) for first, stop in itertools.pairwise(cuts)]
            for first, gradient in zip(cuts, gradients, strict=False):
                rule = momentum(torch.ones_like(gradient)) if with_momentum else None
                (acc.add_later if later else acc.add)(first, gradient, 0.5, rule)
            taken = []
            for block in random.permutation(layout.count):
                taken.append(acc.take_largest(np.array([block]), layout.budgets(0.2)[block : block + 1]).values)
                acc.give_back(some_entries(layout, random, 0.05))
                assert later or not acc.waits
            acc.commit()
            outcomes.append([acc.values.clone(), *taken, *gradients])
    half = len(outcomes) // 2
    for at_once, by_and_by in zip(outcomes[:half], outcomes[half:], strict=True):
        assert all(same_bits(left, right) for left, right in zip(at_once, by_and_by, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tensors", [1, 2])
def test_a_value_that_is_not_finite_is_noticed_when_its_block_is_added_up(threads, tensors):
    """Not before; and what is added after it is added all the same, so that it can be rolled back."""
    layout = BlockLayout.contiguous(12, 3)
    acc = Store(layout, crew=CREWS[threads])
    gradient = torch.ones(12)
    gradient[5] = torch.inf
    for first in range(0, 12, 12 // tensors):
        acc.add_later(first, gradient[first : first + 12 // tensors])
    acc.add_up(np.array([0, 2]))
    assert not acc.poisoned and acc.waits
    acc.add_up()
    assert acc.poisoned and not acc.waits
    assert not gradient.any(), "their memory holds the old residual everywhere"
    acc.rollback()
    assert not acc.values.any()


# --- conservation ------------------------------------------------------------------------------------------------


@given(layout=layouts, seed=seeds)
@examples
def test_what_was_taken_and_given_back_is_all_there(layout, seed):
    """Taking moves entries, giving back adds them: the memory and the messages always sum to what was put in."""
    random = np.random.default_rng(seed)
    acc = Store(layout)
    acc.add(0, numbers(layout.length, seed))
    expected = acc.values.double()
    for _ in range(4):
        taken = some_take(acc, random)
        places = acc.positions(taken)
        assert not acc.values[places].any(), "a taken entry is zero in memory"
        assert same_bits(taken.values, expected[places].float())
        coded = acc.memory.frames.code(taken)
        expected[places] -= coded.decode().values.double()
        torch.testing.assert_close(acc.values.double(), expected, rtol=0, atol=0)
        expected = acc.values.double()


@given(layout=layouts, seed=seeds)
@examples
def test_largest_and_above_are_chosen_within_blocks(layout, seed):
    acc = Store(layout)
    acc.write(0, numbers(layout.length, seed))
    block = int(np.random.default_rng(seed).integers(layout.count))
    held = acc.values[layout.starts[block] : layout.starts[block + 1]].clone()
    if held.numel():
        taken = acc.take_largest(np.array([block]), np.array([1]))
        assert taken.values.abs().tolist() == [float(held.abs().max())]
        acc.give_back(taken)
    assert len(acc.take_above(block, 0.5, held.numel())) == int((held.abs() >= 0.5).sum())
    assert acc.values.numel() == layout.length


@given(layout=layouts, seed=seeds, budget=st.integers(0, 130))
@examples
def test_the_largest_of_all_are_found_wherever_they_lie(layout, seed, budget):
    """Addressed by block, whichever layout: the same entries as out of one flat vector."""
    acc, flat = Store(layout), Store(BlockLayout.contiguous(layout.length, 1))
    acc.write(0, numbers(layout.length, seed))
    flat.values.copy_(acc.values)
    taken, expected = acc.take_largest_of_all(budget), flat.take_largest(np.array([0]), np.array([budget]))
    assert torch.equal(acc.positions(taken).int(), expected.indices)
    assert torch.equal(taken.values, expected.values)
    assert taken.counts.sum() == min(budget, layout.length)
    assert (taken.indices.numpy() < np.repeat(layout.lengths, taken.counts)).all() and (taken.indices >= 0).all()


@given(layout=layouts, seed=seeds, threshold=st.floats(0, 3), limit=st.integers(0, 60))
@examples
def test_what_is_found_stays_and_what_is_counted_is_there(layout, seed, threshold, limit):
    acc = Store(layout)
    acc.write(0, numbers(layout.length, seed))
    before = acc.values.clone()
    for block in range(layout.count):
        found = acc.find_above(block, threshold, limit)
        assert same_bits(acc.values, before)
        taken = acc.take_above(block, threshold, limit)
        assert torch.equal(found.indices, taken.indices) and torch.equal(found.values, taken.values)
        acc.give_back(taken)
    assert acc.count_above(threshold) == int((before.abs() >= threshold).sum())


@given(length=st.integers(1, 120), cuts=st.lists(st.floats(0, 1), max_size=4), seed=seeds)
@examples
def test_entries_keep_their_places_when_blocks_move(length, cuts, seed):
    """For methods whose blocks are stretches with moving boundaries."""
    acc = Store(BlockLayout.contiguous(length, 1))
    acc.write(0, numbers(length, seed))
    before = acc.layout.starts
    entries = acc.take_largest_of_all(length // 2)
    places = acc.positions(entries)
    acc.repartition(np.array([0, *sorted(int(cut * length) for cut in cuts), length]))
    moved = acc.in_present_blocks(entries, before)
    assert len(moved.ids) == len(cuts) + 1
    assert torch.equal(acc.positions(moved), places)
    assert torch.equal(acc.buffer.natural(moved)[0], places)
    acc.give_back(moved)
    assert torch.equal(acc.natural(), numbers(length, seed))
    assert (np.repeat(acc.memory.lengths, moved.counts) > moved.indices.numpy()).all()


def test_gradients_are_added_in_natural_order_and_scaled():
    acc = Store(BlockLayout(10, 3, 2))
    acc.add(0, torch.arange(6.0), scale=2.0)
    acc.add(6, torch.ones(4), scale=-1.0)
    assert acc.natural().tolist() == [0, 2, 4, 6, 8, 10, -1, -1, -1, -1]


# --- one step ----------------------------------------------------------------------------------------------------


def momentum(weights, nesterov=False, fade_after=0.0):
    return Momentum(weights, momentum=0.9, decay=0.01, nesterov=nesterov, fade_after=fade_after)


@pytest.mark.parametrize("residuals", POLICIES)
@pytest.mark.parametrize("with_momentum", [False, True], ids=["plain", "momentum"])
@given(layout=layouts, seed=seeds, held=st.booleans(), later=st.booleans())
@tries(25)
def test_a_step_that_is_rolled_back_never_happened(residuals, with_momentum, layout, seed, held, later):
    """Residual and velocity are what they were, bit for bit, whatever a collective did; also signed zeros."""
    random = np.random.default_rng(seed)
    acc = Store(layout, residuals=residuals, momentum=with_momentum)
    acc.values.copy_(numbers(layout.length, seed))
    acc.values[random.random(layout.length) < 0.2] = -0.0
    if with_momentum:
        acc.velocity.copy_(numbers(layout.length, seed + 1))
    residual, velocity = acc.values.clone(), acc.velocity.clone() if with_momentum else None
    middle = int(random.integers(layout.length + 1))
    for offset, length in ((0, middle), (middle, layout.length - middle)):
        gradient = numbers(length, seed + 2 + offset)
        if held and offset == 0:
            acc.hold(offset, gradient)
        else:
            add = acc.add_later if later else acc.add
            add(offset, gradient, 0.1, momentum(numbers(length, seed + 3)) if with_momentum else None)
    if not later or seed % 2:
        wreck(acc, random)
    else:  # a step that fails early, with some blocks still to be added up
        acc.take_largest(np.array([0]), np.array([1]))
    acc.memory.health.poison()
    acc.rollback()
    assert not acc.poisoned
    assert same_bits(acc.values, residual)
    if with_momentum:
        assert same_bits(acc.velocity, velocity)
    # Nothing of the failed step comes up in the next one.
    acc.add(0, torch.zeros(layout.length), 1.0, momentum(torch.zeros(layout.length)) if with_momentum else None)
    acc.settle(acc.nothing(np.arange(layout.count)))
    acc.commit()
    if not with_momentum:
        assert torch.equal(acc.values, residual)


@given(layout=layouts, seed=seeds)
@examples
def test_a_committed_step_keeps_what_nobody_took(layout, seed):
    """And a rollback after it undoes only what came after."""
    random = np.random.default_rng(seed)
    acc = Store(layout)
    acc.add(0, numbers(layout.length, seed))
    wreck(acc, random)
    kept = acc.values.clone()
    acc.settle(acc.nothing(np.arange(layout.count)))
    acc.commit()
    assert same_bits(acc.values, kept)
    acc.add(0, numbers(layout.length, seed + 1))
    acc.rollback()
    assert same_bits(acc.values, kept)


@pytest.mark.parametrize("with_momentum", [False, True], ids=["plain", "momentum"])
def test_a_held_stretch_counts_as_zero_and_waits(with_momentum):
    """What others sent for it is added to its residual; its velocity stays."""
    acc = Store(BlockLayout(8, 2, 2), momentum=with_momentum)
    acc.write(0, torch.arange(1.0, 9.0))
    if with_momentum:
        acc.write_velocity(0, torch.full((8,), 0.5))
    acc.add(0, torch.zeros(3), 1.0, momentum(torch.zeros(3)) if with_momentum else None)
    acc.hold(3, torch.full((5,), 77.0))
    assert acc.natural()[3:].tolist() == [0, 0, 0, 0, 0]
    arriving = SparseBlocks(
        np.arange(2), np.array([1, 1]), torch.tensor([3, 3], dtype=torch.int32), torch.tensor([0.25, 0.5])
    )
    acc.give_back(arriving)  # natural elements 5 and 7
    acc.commit()
    assert acc.natural()[3:].tolist() == [4, 5, 6.25, 7, 8.5]
    if with_momentum:
        assert acc.natural(acc.velocity)[3:].tolist() == [0.5] * 5


def test_after_a_dense_step_the_sums_leave_this_memory():
    """They are handed out in the gradients; a held stretch keeps its residual and is handed the sum of the others."""
    acc = Store(BlockLayout.contiguous(6, 1))
    acc.write(0, torch.tensor([1.0, 2, 3, 4, 5, 6]))
    gradient, unused = torch.full((4,), 10.0), torch.zeros(2)
    acc.add(0, gradient)
    acc.hold(4, unused)
    acc.values.add_(100)  # the other ranks' part of an all-reduce
    acc.commit(dense=True)
    assert gradient.tolist() == [111, 112, 113, 114]
    assert unused.tolist() == [100, 100]
    assert acc.natural().tolist() == [0, 0, 0, 0, 5, 6]


# --- residual policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residuals", POLICIES)
@given(layout=layouts, seed=seeds)
@tries(80)
def test_each_policy_keeps_what_its_definition_says(residuals, layout, seed):
    """With `own` what this rank put in, `ledger` what lies in memory, S what it took, G the result's support:

    carry ledger · return ledger in G, else own · partial 0 in G and S, else own · local 0 in S, else own.
    """
    random = np.random.default_rng(seed)
    acc, twin = Store(layout, residuals=residuals), Store(layout)
    own, taken = numbers(layout.length, seed), torch.zeros(layout.length, dtype=torch.bool)
    for each in (acc, twin):
        each.add(0, own.clone())
    own = acc.values.clone()
    for _ in range(random.integers(5)):
        if random.random() < 0.5:
            state = random.bit_generator.state
            chosen = some_take(acc, random)
            random.bit_generator.state = state
            some_take(twin, random)
            taken[acc.positions(chosen)] = True
        else:
            arriving = some_entries(layout, random)
            acc.give_back(arriving)
            twin.give_back(arriving)
    ledger = twin.values
    result = some_entries(layout, random, 0.5)
    final = torch.zeros(layout.length, dtype=torch.bool)
    final[acc.positions(result)] = True
    acc.settle(result)
    acc.commit()
    nothing = torch.zeros(layout.length)
    expected = {
        "carry": ledger,
        "return": torch.where(final, ledger, own),
        "partial": torch.where(final & taken, nothing, own),
        "local": torch.where(taken, nothing, own),
    }[residuals]
    assert torch.equal(acc.values, expected)


@pytest.mark.parametrize("residuals", ["return", "partial", "local"])
def test_what_one_step_took_does_not_matter_to_the_next(residuals):
    layout = BlockLayout.contiguous(4, 1)
    acc = Store(layout, residuals=residuals)
    nothing = acc.nothing(np.arange(1))
    acc.add(0, torch.tensor([4.0, 3, 2, 1]))
    acc.take_largest(np.array([0]), np.array([1]))
    acc.settle(nothing)
    acc.commit()
    after = acc.values.clone()
    acc.add(0, torch.zeros(4))
    acc.settle(nothing)
    acc.commit()
    assert torch.equal(acc.values, after)


# --- momentum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fade_after", [0.0, 5.0], ids=["zeroed", "faded"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@given(layout=layouts, seed=seeds)
@tries(40)
def test_velocity_fades_exactly_where_entries_were_taken(nesterov, fade_after, layout, seed):
    """By how long they waited, as far as what was taken tells; everywhere else it is what momentum SGD makes it."""
    random = np.random.default_rng(seed)
    acc = Store(layout, momentum=True)
    acc.write_velocity(0, numbers(layout.length, seed))
    velocity = acc.natural(acc.velocity)
    gradient, weights = numbers(layout.length, seed + 1), numbers(layout.length, seed + 2)
    expected = 0.9 * velocity + 1.0 * (gradient * 0.5 + 0.01 * weights)
    acc.add(0, gradient.clone(), 0.5, momentum(weights, nesterov, fade_after))
    for _ in range(2):
        chosen = some_take(acc, random)
        taken = torch.zeros(layout.length)
        taken[acc.positions(chosen)] = chosen.values.abs()
        taken, most = acc.natural(taken), fade_after * expected.abs()
        expected = torch.where(most < taken, expected * (most / taken), expected)
        error = SparseBlocks(chosen.ids, chosen.counts, chosen.indices, chosen.values * 1e-3)
        acc.give_back(error)
    acc.give_back(some_entries(layout, random))
    acc.commit()
    assert torch.equal(acc.natural(acc.velocity), expected)


def test_what_is_sent_promptly_keeps_its_velocity_and_what_waited_for_long_hardly_any():
    acc = Store(BlockLayout.contiguous(2, 1), momentum=True)
    weights = torch.zeros(2)
    for step in range(100):
        acc.add(0, torch.tensor([2.0, 0.001]), 1.0, Momentum(weights, 0.5, 0.0, fade_after=5.0))
        last = step == 99
        taken = acc.take_largest(np.array([0]), np.array([2 if last else 1]))
        acc.commit()
    assert taken.values[1] > 0.19
    assert acc.velocity[0] == pytest.approx(4.0)
    assert 0 < acc.velocity[1] < 0.0002


def test_a_dense_step_keeps_all_velocity():
    acc = Store(BlockLayout.contiguous(3, 1), momentum=True)
    acc.add(0, torch.tensor([1.0, 2, 3]), 1.0, momentum(torch.zeros(3)))
    acc.commit(dense=True)
    assert acc.velocity.tolist() == [1, 2, 3]
    assert not acc.values.any()


def test_momentum_in_the_accumulator_is_momentum_sgd_when_everything_is_sent():
    """Three dense steps hand out the directions of torch.optim.SGD."""
    for nesterov in (False, True):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
        acc, ours = Store(BlockLayout.interleaved(3, 2), momentum=True), weight.detach().clone()
        for step in range(3):
            weight.grad = torch.tensor([0.3, -0.2, 0.1]) * (step + 1)
            direction = weight.grad.clone()
            acc.add(0, direction, 1.0, momentum(ours, nesterov))
            acc.commit(dense=True)
            optimizer.step()
            ours -= 0.1 * direction
            torch.testing.assert_close(ours, weight.detach())


def test_a_second_gradient_of_the_same_step_continues_momentum():
    """Two gradients, the second of them continued, leave the velocity and the sums that their sum would have left."""
    for nesterov in (False, True):
        weights, first, second = numbers(9, 1), numbers(9, 2), numbers(9, 3)
        outcomes = []
        for parts in ((first + second,), (first, second)):
            acc, applied = Store(BlockLayout(9, 2, 2), momentum=True), torch.zeros(9)
            acc.write_velocity(0, numbers(9, 4))
            for number, part in enumerate(parts):
                rule = Momentum(weights, 0.9, 0.01, 0.3, nesterov, continued=number > 0)
                handed = part.clone()
                acc.add(0, handed, 0.5, rule)
                acc.commit(dense=True)
                applied += handed
            outcomes.append((applied, acc.natural(acc.velocity)))
        torch.testing.assert_close(outcomes[0], outcomes[1])


# --- poisoned ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residuals", POLICIES)
def test_a_poisoned_accumulator_gives_nothing_and_accepts_nothing(residuals):
    layout = BlockLayout(20, 3, 2)
    acc = Store(layout, residuals=residuals)
    acc.write(0, numbers(20, 0))
    before = acc.values.clone()
    acc.memory.health.poison()
    ids = np.arange(3)
    taken = acc.take_largest(ids, layout.lengths)
    assert len(taken) == 0 and taken.counts.tolist() == [0, 0, 0] and taken.ids.tolist() == [0, 1, 2]
    assert len(acc.take_above(1, 0.0, 99)) == 0
    entries = some_entries(layout, np.random.default_rng(1))
    acc.give_back(entries)
    assert acc.take_at(entries).tolist() == [0] * len(entries)
    assert len(acc.find_above(0, 0.0, 99)) == len(acc.take_largest_of_all(99)) == 0
    assert len(acc.take_above_of_all(0.0, 99)) == acc.count_bins(0, 0, 20, 2048).sum() == 0
    assert same_bits(acc.values, before)
    acc.rollback()
    assert same_bits(acc.values, before) and not acc.poisoned
    assert len(acc.take_largest(ids, layout.lengths)) == 20


# --- the shortlist -----------------------------------------------------------------------------------------------


def largest_places(values, budget):
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:budget]
    return sorted(i for i in order if values[i] != 0)


@pytest.mark.parametrize("rounding", [False, True], ids=["exact", "rounded"])
@given(
    length=st.integers(1, 3000),
    count=st.integers(1, 4),
    chunk=st.sampled_from([1, 7, 64, 1024]),
    share=st.sampled_from([0.002, 0.02, 0.2]),
    scales=st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.1, 30.0, 0.0]), min_size=2, max_size=7),
    seed=seeds,
)
@tries(60)
def test_step_after_step_the_largest_are_exact(rounding, length, count, chunk, share, scales, seed):
    """Whatever the last step made the shortlist expect: gradients of other sizes, arrivals, stretches, ties, zeros."""
    layout, random = BlockLayout(length, count, chunk), np.random.default_rng(seed)
    acc = Store(layout)
    for scale in scales:
        gradient = numbers(length, int(random.integers(2**32))) * scale
        if random.random() < 0.3:
            gradient = gradient.round()
        middle = int(random.integers(length + 1))
        for first, stop in ((0, middle), (middle, length)):
            assert acc.add(first, gradient[first:stop].clone())
        reference = acc.values.numpy().copy()
        arriving = some_entries(layout, random)
        acc.give_back(arriving)
        reference[acc.positions(arriving).numpy()] += arriving.values.numpy()
        for block in random.permutation(count):
            first, stop = layout.starts[block : block + 2]
            budget = max(1, int(share * (stop - first)))
            expected = largest_places(reference[first:stop].tolist(), budget)
            sent = torch.from_numpy(reference[first:stop][expected])
            if rounding:
                sent = sent.bfloat16().float()
                taken = acc.take_rounded(np.array([block]), np.array([budget]))
            else:
                taken = acc.take_largest(np.array([block]), np.array([budget]))
            assert taken.counts.tolist() == [len(expected)] and taken.indices.tolist() == expected
            assert same_bits(taken.values, sent)
            reference[first:stop][expected] -= sent.numpy()
        assert torch.equal(acc.values, torch.from_numpy(reference))
        acc.settle(acc.nothing(np.arange(count)))
        acc.commit()


def test_in_steady_state_the_shortlist_serves_every_selection():
    """Its lists hold the budget and not much more, so that selection does not read the whole memory."""
    layout, budgets = BlockLayout.interleaved(400_000, 4), np.full(4, 1000)
    acc = Store(layout)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        acc.add(0, torch.randn(layout.length, generator=generator))
        if step >= 6:
            lists = acc.shortlist.lists
            assert (lists.fills > budgets).all() and (lists.fills <= np.diff(lists.edges)).all()
            thresholds = [acc.values[lists_of].abs().topk(1000).values[-1] for lists_of in blocks_of(layout)]
            assert (lists.lows.view(np.float32) <= np.array(thresholds)).all()
        acc.take_largest(np.arange(4), budgets)
        acc.commit()


def blocks_of(layout):
    return [slice(first, stop) for first, stop in zip(layout.starts[:-1], layout.starts[1:], strict=True)]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_whoever_adds_a_value_that_is_not_finite_is_told(bad):
    acc = Store(BlockLayout.interleaved(5000, 3))
    for place in (0, 63, 64, 4999):
        gradient = torch.zeros(5000)
        gradient[place] = bad
        assert not acc.add(0, gradient)
        acc.rollback()
        assert acc.add(0, torch.ones(5000))
        acc.rollback()


def test_thresholds_are_served_by_the_shortlist_too():
    """Ok-Topk's and ExDyna's way: the same entries with and without a list."""
    layout = BlockLayout.contiguous(20_000, 1)
    acc, generator = Store(layout), torch.Generator().manual_seed(1)
    for step in range(6):
        acc.add(0, torch.randn(layout.length, generator=generator) * (0.3 if step else 1.0))
        threshold = 2.5 - 0.02 * step
        expected = ((acc.values.abs() >= threshold).nonzero().flatten()).tolist()
        assert acc.count_above(threshold) == len(expected)
        assert (acc.shortlist.down_to(np.float32(threshold).view(np.uint32)) is not None) == (step > 0)
        taken = acc.take_above_of_all(threshold, 10**6)
        assert acc.positions(taken).tolist() == expected
        acc.commit()
