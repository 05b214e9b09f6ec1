"""`spardl bench`: who takes part, what its table says, and its pictures."""

from pathlib import Path
from typing import Any

import pytest

from commands import environment, json_lines, spardl
from spardl.bench.match import RIVALS
from spardl.cli.bench import chosen_match, chosen_vectors
from spardl.cli.charts import AXES, FORMAT_LINES, against, label, save_picture, stacked
from spardl.cli.commands import parse
from spardl.wire.format import VALUE_FORMATS


def match_of(*arguments: str) -> Any:
    return chosen_match(parse(["bench", *arguments]))


def test_methods_run_at_each_density_and_in_each_format() -> None:
    """What sends everything has neither, and runs once."""
    match = match_of("--methods", "dense,topka,spardl", "--densities", "0.1,0.01", "--values", "bf16,int8")
    found = [(config.method, config.density, config.values) for config in match.configs]
    each = [(0.1, "bf16"), (0.1, "int8"), (0.01, "bf16"), (0.01, "int8")]
    assert found[0][0] == "dense"
    assert found[1:] == [(method, *setting) for method in ("topka", "spardl") for setting in each]
    assert match.densities == [0.1, 0.01]


def test_rivals_are_named_or_all_or_none() -> None:
    assert match_of().rivals == []
    assert match_of("--rivals", "all").rivals == list(RIVALS)
    assert match_of("--rivals", "fp16,powersgd-4").rivals == ["fp16", "powersgd-4"]


def test_network_facts_are_read_with_their_units() -> None:
    match = match_of("--rate", "200mbit", "--latency", "5ms")
    assert (match.rate, match.latency) == (25e6, 0.005)


def test_gradients_have_lengths_or_names() -> None:
    """Of any size, several at once."""
    sizes = chosen_vectors(parse(["bench", "--elements", "1e4,1e6"]))
    assert [make().elements for make in sizes] == [10_000, 1_000_000]
    names = chosen_vectors(parse(["bench", "--model", "resnet20,vgg16"]))
    assert [make().elements for make in names] == [269_722, 14_728_266]


def test_a_sweep_gives_a_table_records_and_a_picture(tmp_path: Path) -> None:
    """One table per gradient, one record per gradient and contestant, one picture of all."""
    target, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    sweep = ("--elements", "5000,20000", "--rivals", "fp16,handwritten-topk", "--methods", "dense,spardl")
    rest = ("--repetitions", 2, "--warmup", 1, "--rate", "1gbit", "--json", target, "--picture", picture)
    done = spardl("bench", "--workers", 2, *sweep, *rest, env=environment(COLUMNS=140))
    assert done.returncode == 0, done.stderr
    for words in ("One gradient of 5,000 elements", "One gradient of 20,000 elements", "x of limit", "lines of 1 Gbit"):
        assert words in done.stdout
    found = json_lines(target.read_text())
    methods = ("dense", "spardl", "fp16", "handwritten-topk")
    assert [(record["elements"], record["method"]) for record in found] == [
        (elements, method) for elements in (5000, 20_000) for method in methods
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- pictures -------------------------------------------------------------------------------------------------------


def record(method: str, **changes: Any) -> dict[str, Any]:
    """What a benchmark writes, as far as pictures look at it."""
    usual = {
        "elements": 1000,
        "workers": 4,
        "density": 0.01,
        "rate": 25e6,
        "latency_s": 0.0,
        "values": "bf16",
        "median_s": 0.01,
        "quartiles_s": [0.009, 0.012],
        "limit_s": 0.001,
    }
    if method == "dense":
        usual |= {"density": 1.0, "values": "fp32"}
    elif method == "spardl":
        usual |= {"seconds_selecting": 0.002, "seconds_waiting": 0.001, "seconds_transferring": 0.005}
    return {"method": method, **usual, **changes}


@pytest.mark.parametrize("key", ["elements", "rate", "workers"])
def test_each_method_is_a_line(key: str) -> None:
    """And so is the limit of the sparse ones."""
    found = [record(method, **{key: value}) for method in ("dense", "spardl") for value in (100, 200, 400)]
    (axes,) = against(found, AXES[key]).axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    assert lines == {name: [100, 200, 400] for name in ("dense", "spardl", "limit (sparse)")}


def test_what_has_no_density_is_a_level_line() -> None:
    found = [record("dense", median_s=1.0), *(record("spardl", density=density) for density in (0.1, 0.01))]
    (axes,) = against(found, AXES["density"]).axes
    dense = next(line for line in axes.get_lines() if line.get_label() == "dense")
    assert (list(dense.get_xdata()), list(dense.get_ydata())) == ([0.01, 0.1], [1.0, 1.0])


def test_parts_of_a_bar_add_up_to_the_median() -> None:
    """Whatever the parts are; what takes far longer than all of them is named below."""
    found = [record("spardl", seconds_packing=0.002), record("topka", median_s=0.012), record("dense", median_s=5.0)]
    (axes,) = stacked(found).axes
    widths: dict[float, float] = {}
    for bar in axes.patches:
        widths[bar.get_y()] = widths.get(bar.get_y(), 0.0) + bar.get_width()
    assert sorted(widths.values()) == pytest.approx([0.01, 0.012])
    assert "dense 5.00 s" in axes.get_xlabel()
    assert "packing" in axes.get_legend_handles_labels()[1]


def test_formats_are_told_apart() -> None:
    assert label(record("spardl")) == "spardl"
    assert label(record("spardl", values="int8")) == "spardl, int8"
    assert label(record("dense")) == "dense"
    assert label(record("fp16", values="fp16")) == "fp16"
    assert label(record("powersgd-4", values="fp32")) == "powersgd-4"


def test_every_format_has_a_line_of_its_own() -> None:
    """But for bf16, the usual one, whose line is solid."""
    formats = {form.name for form in VALUE_FORMATS.values() if form.carries_values} - {"bf16"}
    assert FORMAT_LINES.keys() == formats
    assert len({"-", *map(str, FORMAT_LINES.values())}) == 1 + len(formats)


def test_nothing_that_varies_is_a_picture_of_parts(tmp_path: Path) -> None:
    save_picture([record("spardl"), record("dense")], str(tmp_path / "parts.svg"))
    assert "selecting" in (tmp_path / "parts.svg").read_text()
