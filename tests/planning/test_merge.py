"""Merge planners: every plan is a partition of the backward pass, and none is better than the exact one."""

import dataclasses
import functools
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import tries
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.planning import pareto
from spardl.planning.cost import CostModel, Linear, from_network, published
from spardl.planning.merge import PLANNERS, exact, mgwfbp, of_size, omgs, plan
from spardl.planning.profile import Layer, Profile
from spardl.planning.shapes import resnet50, vgg16
from spardl.planning.timeline import predict

NAMES = (*PLANNERS, "size:1", "size:8192", "size:1000000")
ROUNDING = 1 + 1e-12

seconds = st.floats(0, 0.02) | st.just(0.0)


@st.composite
def cost_models(draw):
    """Lines, the published curves, costs that jump, and selection in or beside the stream of backward."""
    kind = draw(st.sampled_from(["linear", "published", "steps"]))
    if kind == "published":
        model = published(draw(st.sampled_from([2, 4, 8, 16])))
    elif kind == "linear":
        model = CostModel(*(Linear(draw(seconds), draw(st.floats(0, 1e-8))) for _ in range(2)))
    else:
        width, first, second = draw(st.integers(1, 10**6)), draw(seconds), draw(seconds)
        model = CostModel(lambda n: first * (1 + n % width / width), lambda n: second * (1 + n // width % 3))
    return dataclasses.replace(model, selection_blocks=draw(st.booleans()))


@st.composite
def profiles(draw, least=1, most=10):
    layers = draw(st.lists(st.tuples(st.integers(1, 3 * 10**6), seconds), min_size=least, max_size=most))
    return Profile(tuple(Layer(f"layer {i}", *each) for i, each in enumerate(layers)), draw(seconds))


@functools.cache
def network(method, *, blocks):
    config = SyncConfig(method=method, density=0.01)
    return from_network(config, 4, latency=2e-4, bandwidth=1.25e7, selection_rate=4e8, selection_blocks=blocks)


MODELS = {
    "published for 2": lambda: published(2),
    "published for 8": lambda: published(8),
    "published for 16": lambda: published(16),
    "published for 8, selection beside backward": lambda: dataclasses.replace(published(8), selection_blocks=False),
    "slow start": lambda: CostModel(Linear(1e-4, 1e-10), Linear(2e-2, 1e-10)),
    "slow links": lambda: CostModel(Linear(1e-5, 1e-9), Linear(1e-4, 1e-7)),
    "free": lambda: CostModel(Linear(0, 0), Linear(0, 0)),
    "simulated SparDL": lambda: network("spardl", blocks=False),
    "simulated dense": lambda: network("dense", blocks=True),
}


def ends(names, profile, cost):
    return {name: plan(name, profile, cost).timeline.end for name in names}


def partitions(count):
    """Every way to cut `count` layers into runs."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        yield [last - first for first, last in itertools.pairwise(edges)]


def counts(made):
    return [len(group) for group in made.groups]


# --- the exact planner ------------------------------------------------------------------------------------------------


@tries(60)
@given(profiles(most=8), cost_models())
def test_the_exact_plan_is_the_best_of_all_partitions(profile, cost):
    best = min(predict(profile, cost, sizes).end for sizes in partitions(len(profile.layers)))
    assert exact(profile, cost).timeline.end == pytest.approx(best, rel=1e-12, abs=1e-18)


@tries(20)
@given(profiles(least=10), cost_models())
def test_the_exact_plan_is_the_best_of_all_512_partitions_of_ten_layers(profile, cost):
    best = min(predict(profile, cost, sizes).end for sizes in partitions(10))
    assert exact(profile, cost).timeline.end == pytest.approx(best, rel=1e-12, abs=1e-18)


@tries(60)
@given(profiles(most=25), cost_models())
def test_no_planner_beats_the_exact_one(profile, cost):
    best = exact(profile, cost).timeline.end
    for name, end in ends(NAMES, profile, cost).items():
        assert best <= end * ROUNDING, f"{name} is better"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [resnet50, vgg16])
def test_no_planner_beats_the_exact_one_on_real_models(shape, model):
    profile, cost = shape(), MODELS[model]()
    best = exact(profile, cost).timeline.end
    for name, end in ends(NAMES, profile, cost).items():
        assert best <= end * ROUNDING, f"{name} is better"


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_161_tensors_take_few_labels(workers):
    """Some ten thousand labels, none of more than 200 at one boundary: a fraction of a second."""
    profile, cost = resnet50(), published(workers)
    started = time.perf_counter()
    made = exact(profile, cost)
    elapsed = time.perf_counter() - started
    known = min(ends(["single", "layer", "omgs", "mgwfbp", "size:1000000"], profile, cost).values())
    found = pareto.search(profile, cost, known)
    print(f"{workers} workers: {len(made.groups)} groups in {elapsed:.2f} s, {found.labels} labels")
    assert found.labels < 20_000
    assert found.widest < 200


def test_labels_do_not_depend_on_what_is_known_beforehand():
    """A known partition only makes the search shorter."""
    profile, cost = vgg16(), published(8)
    made = exact(profile, cost)
    found = pareto.search(profile, cost, known=1e9)
    assert predict(profile, cost, found.counts).end == pytest.approx(made.timeline.end, rel=1e-12)
    assert pareto.search(profile, cost, known=made.timeline.end).labels < found.labels


def test_without_a_stall_one_label_per_boundary_is_enough():
    profile = resnet50()
    cost = dataclasses.replace(published(8), selection_blocks=False)
    assert pareto.search(profile, cost, known=1e9).widest == 1


def test_the_exact_plan_has_no_group_that_gains_nothing():
    """If communication is free, one group ends as early as any; merging any two neighbours otherwise costs time."""
    profile = resnet50()
    assert len(exact(profile, MODELS["free"]()).groups) == 1
    cost = CostModel(Linear(1e-4, 1e-10), Linear(1e-4, 1e-10), selection_blocks=False)
    made = exact(profile, cost)
    sizes = counts(made)
    assert len(sizes) < 5
    for i in range(len(sizes) - 1):
        merged = [*sizes[:i], sizes[i] + sizes[i + 1], *sizes[i + 2 :]]
        assert predict(profile, cost, merged).end > made.timeline.end


# --- the published planners -------------------------------------------------------------------------------------------


def greedy_reference(profile, cost):
    """OMGS-SGD's greedy on whole tables, all times computed anew for every decision; index 0 is first in backward."""
    t_b = [each.seconds for each in profile.layers]
    d = [each.elements for each in profile.layers]
    sizes = [1]
    for i in range(len(d) - 1):
        tau_b, free = 0.0, 0.0
        for j in range(i + 1):
            selected = tau_b + t_b[j] + cost.selection(d[j])
            tau_c = max(free, selected) if d[j] else free
            tau_b, free = selected, tau_c + cost.exchange(d[j])
        extra = cost.selection(d[i] + d[i + 1]) - cost.selection(d[i]) - cost.selection(d[i + 1])
        wait = t_b[i + 1] + extra - (tau_c - selected)
        if wait < cost.exchange(d[i]) + cost.exchange(d[i + 1]) - cost.exchange(d[i] + d[i + 1]):
            t_b[i + 1], d[i + 1], t_b[i], d[i] = t_b[i] + t_b[i + 1], d[i] + d[i + 1], 0.0, 0
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def dense_reference(profile, cost):
    """MG-WFBP's three cases; with linear costs, what a merge saves is a start-up."""
    layers, ready, free, held, sizes = profile.layers, 0.0, 0.0, 0, []
    for i, layer in enumerate(layers):
        ready, held = ready + layer.seconds, held + layer.elements
        start = max(free, ready)
        following = ready + layers[i + 1].seconds if i + 1 < len(layers) else float("inf")
        sizes = [*sizes[:-1], sizes[-1] + 1] if held > layer.elements else [*sizes, 1]
        done = following >= start + cost.exchange(held)
        if done or (following >= start and following - start >= cost.exchange.startup):
            free, held = start + cost.exchange(held), 0
    return sizes


# Times with few digits, so that both sides of a comparison are rounded alike.
grid = st.integers(0, 64).map(lambda ticks: ticks / 1024)


@st.composite
def gridded(draw):
    layers = draw(st.lists(st.tuples(st.integers(1, 64), grid), min_size=1, max_size=20))
    profile = Profile(tuple(Layer(str(i), *each) for i, each in enumerate(layers)))
    lines = [Linear(draw(grid), draw(st.integers(0, 8)) / 4096) for _ in range(2)]
    return profile, CostModel(*lines)


@given(gridded())
def test_the_greedy_is_the_published_one(instance):
    assert counts(omgs(*instance)) == greedy_reference(*instance)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("shape", [resnet50, vgg16])
def test_the_greedy_is_the_published_one_on_real_models(shape, workers):
    assert counts(omgs(shape(), published(workers))) == greedy_reference(shape(), published(workers))


def test_the_greedy_merges_everything_where_start_ups_are_long():
    """The published rule's weakness: on 16 workers it sends ResNet-50 in one group, a quarter later than the best."""
    profile, cost = resnet50(), published(16)
    greedy, best = omgs(profile, cost), exact(profile, cost)
    assert len(greedy.groups) == 1
    assert greedy.timeline.end > 1.25 * best.timeline.end


@given(gridded())
def test_the_dense_greedy_is_the_published_one(instance):
    profile, cost = instance
    assert counts(mgwfbp(profile, cost)) == dense_reference(profile, cost)


def test_the_dense_greedy_is_close_to_the_best_with_dense_costs():
    """MG-WFBP's constants for 10 Gbit/s and 8 workers: within 3 % of the optimum."""
    profile = resnet50()
    cost = CostModel(Linear(0, 0), Linear(5.23e-4, 4 * 8.57e-10))
    assert mgwfbp(profile, cost).timeline.end < 1.03 * exact(profile, cost).timeline.end


# --- every planner ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(profiles(), cost_models(), st.sampled_from(NAMES))
def test_groups_are_runs_that_cover_the_backward_pass_in_order(profile, cost, name):
    made = plan(name, profile, cost)
    assert all(made.groups)
    assert [each for group in made.groups for each in group] == [layer.name for layer in profile.layers]
    assert [stage.tensors for stage in made.timeline.stages] == counts(made)
    assert made.planner == name


def test_a_group_of_a_size_closes_as_soon_as_it_holds_so_many():
    sizes = [3, 4, 10, 1, 1]
    profile = Profile(tuple(Layer(str(i), size, 0.0) for i, size in enumerate(sizes)))
    cost = CostModel(Linear(0, 0), Linear(0, 0))
    assert counts(of_size(6)(profile, cost)) == [2, 1, 2]
    assert counts(plan("size:1", profile, cost)) == counts(plan("layer", profile, cost)) == [1] * 5
    assert counts(plan("size:99", profile, cost)) == counts(plan("single", profile, cost)) == [5]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exakt", "Did you mean exact"),
        ("omg", "Did you mean omgs"),
        ("size", "such as size:8192"),
        ("size:", "such as size:8192"),
        ("size:0", "such as size:8192"),
        ("size:-3", "such as size:8192"),
        ("size:two", "such as size:8192"),
        ("", "Choose from exact, omgs, mgwfbp, layer, single, size:N"),
        ("size:N", "such as size:8192"),
    ],
)
def test_an_unknown_planner_gets_a_sentence(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(name, vgg16(), published(2))


def test_plans_with_the_same_partition_have_the_same_digest():
    profile = vgg16()
    one, other = plan("single", profile, published(2)), plan("size:99999999", profile, published(8))
    assert one.digest() == other.digest()
    assert one.digest() != plan("layer", profile, published(2)).digest()
    assert len(one.digest()) == 64


def test_a_plan_says_what_it_holds():
    made = plan("exact", vgg16(), published(2))
    record = made.to_dict()
    assert record["groups"] == [list(group) for group in made.groups]
    assert record["digest"] == made.digest()
    assert record["iteration_s"] == made.timeline.iteration
