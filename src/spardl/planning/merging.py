"""From a profile and costs to the groups of a running model: what was decided, why, and what it should bring."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spardl.agreement import check_agreement, gather_values
from spardl.config import SyncConfig
from spardl.planning import lags, timeline
from spardl.planning.merge import Plan, plan, single
from spardl.planning.probe import Costs, Device, measure
from spardl.planning.profile import Profile, agreed
from spardl.transport.base import Transport


@dataclass(frozen=True)
class Merging:
    """A plan in force: `before` is one group after backward, `after` the planner's choice, under the same costs.

    densities  one per group where LAGS chose them, else None
    """

    profile: Profile
    costs: Costs
    before: Plan
    after: Plan
    densities: tuple[float, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            "profile": self.profile.to_dict(),
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "densities": self.densities,
        }

    def table(self) -> list[timeline.Row]:
        """One row per group, under `timeline.COLUMNS`."""
        return timeline.table(self.after.timeline)

    def draw(self, path: str | Path) -> None:
        """Write a picture of the lanes of a step, before and after merging."""
        timeline.draw(self.before.timeline, self.after.timeline, path)


def decide(config: SyncConfig, profile: Profile, costs: Costs) -> Merging:
    """What the configured planner makes of this profile, and LAGS of the plan, if it is asked for."""
    assert config.merge is not None
    model = costs.model()
    chosen = plan(config.merge, profile, model)
    densities = None
    if config.density_range is not None:
        floor, ceiling = config.density_range
        densities = lags.densities(chosen.timeline, *costs.for_lags(), floor=floor, ceiling=ceiling)
    return Merging(profile, costs, single(profile, model), chosen, densities)


def agree(
    config: SyncConfig,
    reading: Mapping[str, Any],
    sizes: Mapping[str, int],
    transport: Transport,
    *,
    momentum: bool = False,
    device: Device = "cpu",
) -> Merging:
    """Measure, plan, and make sure that all ranks came to the same. Collective, between steps."""
    profile = agreed(gather_values(transport.gather_texts, reading), sizes)
    costs = measure(config, transport, profile.elements, momentum=momentum, device=device)
    merging = decide(config, profile, costs)
    facts = {"plan": merging.after.digest(), "densities": merging.densities}
    check_agreement(facts, transport.gather_texts, "merge plan")
    return merging
