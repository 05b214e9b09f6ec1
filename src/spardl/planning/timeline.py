"""What a step with given groups will look like: three lanes, backward, selection and communication.

Groups run in backward order. A group is ready when its last gradient is; it selects its entries, and is exchanged when
the channel is free. Where selection blocks, it delays the backward of all groups after it:

    backward ends    b(g) = b(g-1) + stall(g-1) + backward(g)
    exchange ends    c(g) = max(c(g-1), b(g) + stall(g)) + occupation(g)
    step             forward + max(b + stall, c) of the last group
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spardl.errors import ConfigError
from spardl.extras import require
from spardl.planning.cost import CostModel
from spardl.planning.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = tuple[str, int, int, float, float, float, float]

COLUMNS = (
    "group",
    "tensors",
    "elements",
    "gradients ready (ms)",
    "selected (ms)",
    "exchange starts (ms)",
    "exchange ends (ms)",
)
# Lanes of a picture. Groups alternate between two shades, so that neighbours can be told apart.
COLOURS = {"backward": "#7d97b5", "selection": "#e0a030", "communication": "#3f7f5f"}
SHADES = (1.0, 0.7)
EXPOSED = "#c0392b"
FAINT = 0.15


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` to `end`, in seconds since backward began."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Stage:
    """One group's way through a step."""

    name: str
    tensors: int
    elements: int
    backward: Span
    selection: Span
    communication: Span


@dataclass(frozen=True, slots=True)
class Timeline:
    """All groups of a step, in backward order."""

    stages: tuple[Stage, ...]
    forward: float
    compute_end: float

    @property
    def end(self) -> float:
        """When the last result is there, in seconds since backward began."""
        return max(self.compute_end, self.stages[-1].communication.end)

    @property
    def iteration(self) -> float:
        """Seconds of one step: forward, backward, and what is left to exchange after it."""
        return self.forward + self.end

    @property
    def exposed(self) -> float:
        """Seconds of synchronisation that nothing hides."""
        return self.end - self.compute_end


def predict(profile: Profile, cost: CostModel, counts: Sequence[int]) -> Timeline:
    """The timeline of groups of `counts[i]` layers each, in backward order."""
    if any(count < 1 for count in counts) or sum(counts) != len(profile.layers):
        raise ConfigError(f"groups of {list(counts)} layers do not make up the {len(profile.layers)} of this profile.")
    stages: list[Stage] = []
    compute = channel = 0.0
    first = 0
    for count in counts:
        layers = profile.layers[first : first + count]
        first += count
        elements = sum(layer.elements for layer in layers)
        backward = Span(compute, compute + math.fsum(layer.seconds for layer in layers))
        begins = backward.end if cost.selection_blocks else max(channel, backward.end)
        selection = Span(begins, begins + cost.selection(elements))
        compute = backward.end + cost.stall(elements)
        begins = max(channel, selection.end)
        communication = Span(begins, begins + cost.exchange(elements))
        channel = communication.end
        name = layers[0].name if count == 1 else f"{layers[0].name} .. {layers[-1].name}"
        stages.append(Stage(name, count, elements, backward, selection, communication))
    return Timeline(tuple(stages), profile.forward, compute)


def table(timeline: Timeline) -> list[Row]:
    """One row per group, under `COLUMNS`; times in milliseconds since backward began."""
    return [
        (
            stage.name,
            stage.tensors,
            stage.elements,
            stage.backward.end * 1e3,
            stage.selection.end * 1e3,
            stage.communication.start * 1e3,
            stage.communication.end * 1e3,
        )
        for stage in timeline.stages
    ]


def draw(
    before: Timeline,
    after: Timeline,
    path: Path | str,
    *,
    titles: tuple[str, str] | None = None,
) -> None:
    """Draw two timelines, one above the other on one time axis; PNG, SVG or PDF by the suffix of `path`."""
    require("matplotlib", "timelines are drawn by matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"a picture cannot be written as {str(path)!r}; end its name in .png, .svg or .pdf.")
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(2, 1, sharex=True)
    for panel, timeline, title in zip(axes, (before, after), titles or (_title(before), _title(after)), strict=True):
        _draw_lanes(panel, timeline, title)
    axes[1].set_xlabel("time since backward began (ms)")
    axes[1].set_xlim(0, max(before.end, after.end) * 1e3 * 1.02 or 1.0)
    handles: list[Any] = [Patch(color=colour, label=lane) for lane, colour in COLOURS.items()]
    handles.append(Patch(facecolor=EXPOSED, alpha=FAINT, label="exposed: nothing hides it"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)


def _title(timeline: Timeline) -> str:
    count = len(timeline.stages)
    return "One group after backward" if count == 1 else f"{count} groups, exchanged while backward goes on"


def _draw_lanes(panel: "Axes", timeline: Timeline, title: str) -> None:
    lanes = list(COLOURS)
    for place, lane in enumerate(lanes):
        spans: list[Span] = [getattr(stage, lane) for stage in timeline.stages]
        bars = [(span.start * 1e3, span.length * 1e3) for span in spans]
        for turn, shade in enumerate(SHADES):
            panel.broken_barh(
                bars[turn :: len(SHADES)], (place - 0.36, 0.72), color=(COLOURS[lane], shade), linewidth=0
            )
    if timeline.exposed > 0:
        left, right = timeline.compute_end * 1e3, timeline.end * 1e3
        panel.axvspan(left, right, color=EXPOSED, alpha=FAINT, linewidth=0, zorder=0)
    panel.axvline(timeline.end * 1e3, color=EXPOSED, linewidth=1)
    panel.set_yticks(range(len(lanes)), lanes)
    panel.set_ylim(len(lanes) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    times = f"step {_ms(timeline.iteration)} with {_ms(timeline.forward)} of forward; {_ms(timeline.exposed)} exposed"
    panel.set_title(times, loc="right", fontsize=10)


def _ms(seconds: float) -> str:
    """Three figures: 0.0123, 4.57 or 353 ms."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"
