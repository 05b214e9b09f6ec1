"""Timelines: the recurrences of three lanes, as rows and as a picture."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.errors import ConfigError
from spardl.planning.cost import CostModel, Linear, published
from spardl.planning.merge import exact, layer, single
from spardl.planning.profile import Layer, Profile
from spardl.planning.shapes import vgg16
from spardl.planning.timeline import COLUMNS, draw, predict, table

seconds = st.floats(0, 0.1)
counts = st.lists(st.integers(1, 4), min_size=1, max_size=8)


@st.composite
def instances(draw):
    sizes = draw(counts)
    layers = [Layer(str(i), draw(st.integers(1, 10**6)), draw(seconds)) for i in range(sum(sizes))]
    lines = [Linear(draw(seconds), draw(st.floats(0, 1e-7))) for _ in range(2)]
    return Profile(tuple(layers), draw(seconds)), CostModel(*lines, selection_blocks=draw(st.booleans())), sizes


def reference(profile, cost, sizes):
    """Iteration time and exposed communication, one group after the other."""
    layers, compute, channel = list(profile.layers), 0.0, 0.0
    for size in sizes:
        group, layers = layers[:size], layers[size:]
        elements = sum(each.elements for each in group)
        compute += sum(each.seconds for each in group)
        if cost.selection_blocks:
            compute += cost.selection(elements)
            channel = max(channel, compute) + cost.exchange(elements)
        else:
            channel = max(channel, compute) + cost.selection(elements) + cost.exchange(elements)
    end = max(compute, channel)
    return profile.forward + end, end - compute


@given(instances())
def test_a_step_takes_as_long_as_the_recurrences_say(instance):
    timeline = predict(*instance)
    iteration, exposed = reference(*instance)
    assert timeline.iteration == pytest.approx(iteration, rel=1e-12)
    assert timeline.exposed == pytest.approx(exposed, rel=1e-9, abs=1e-12)


@given(instances())
def test_no_lane_does_two_things_at_once_and_a_group_passes_them_in_order(instance):
    profile, cost, sizes = instance
    stages = predict(profile, cost, sizes).stages
    for stage in stages:
        assert stage.backward.end <= stage.selection.start
        assert stage.selection.end <= stage.communication.start
    for before, after in itertools.pairwise(stages):
        assert before.backward.end <= after.backward.start
        assert before.selection.end <= after.selection.start
        assert before.communication.end <= after.communication.start
        if cost.selection_blocks:
            assert before.selection.end <= after.backward.start
        else:
            assert before.communication.end <= after.selection.start


def test_a_group_that_waits_for_the_channel_starts_when_it_is_free():
    """Worked by hand: two layers of 1 s, selection 1 s, exchange 5 s."""
    profile = Profile((Layer("b", 1, 1.0), Layer("a", 1, 1.0)), forward=10.0)
    cost = CostModel(Linear(1, 0), Linear(5, 0))
    assert table(predict(profile, cost, [1, 1])) == [
        ("b", 1, 1, 1000.0, 2000.0, 2000.0, 7000.0),
        ("a", 1, 1, 3000.0, 4000.0, 7000.0, 12000.0),
    ]
    apart, together = predict(profile, cost, [1, 1]), predict(profile, cost, [2])
    assert (apart.iteration, apart.exposed) == (22.0, 8.0)
    assert (together.iteration, together.exposed) == (18.0, 5.0)
    assert together.stages[0].name == "b .. a"


@pytest.mark.parametrize("sizes", [[1], [1, 2], [2, 0], []])
def test_groups_make_up_the_profile(sizes):
    profile = Profile((Layer("b", 1, 1.0), Layer("a", 1, 1.0)))
    with pytest.raises(ConfigError, match="do not make up the 2"):
        predict(profile, CostModel(Linear(1, 0), Linear(1, 0)), sizes)


def test_a_table_has_one_row_per_group_under_its_columns():
    rows = table(layer(vgg16(), published(4)).timeline)
    assert len(rows) == 54
    assert {len(row) for row in rows} == {len(COLUMNS)}


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, suffix, magic):
    profile, cost = vgg16(), published(4)
    path = tmp_path / f"timeline{suffix}"
    draw(single(profile, cost).timeline, exact(profile, cost).timeline, path)
    assert path.read_bytes().startswith(magic)


def test_a_picture_of_an_instant_step_is_still_a_picture(tmp_path):
    free = CostModel(Linear(0, 0), Linear(0, 0))
    timeline = predict(Profile((Layer("a", 1, 0.0),)), free, [1])
    draw(timeline, timeline, tmp_path / "instant.png", titles=("before", "after"))
    assert (tmp_path / "instant.png").stat().st_size > 0


def test_a_picture_needs_a_known_suffix(tmp_path):
    timeline = single(vgg16(), published(4)).timeline
    with pytest.raises(ConfigError, match=r"end its name in \.png"):
        draw(timeline, timeline, tmp_path / "timeline.txt")


def test_without_matplotlib_drawing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    timeline = single(vgg16(), published(4)).timeline
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(timeline, timeline, tmp_path / "timeline.png")
