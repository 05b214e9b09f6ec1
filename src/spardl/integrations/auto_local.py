"""`method="auto"` with local updates: which exchange of weights is quickest, everything averaged included."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spardl.agreement import gather_values
from spardl.config import SyncConfig
from spardl.integrations.auto import chosen_then
from spardl.integrations.local import LocalSync
from spardl.integrations.model import stepped_parameters
from spardl.planning.candidates import Candidate
from spardl.planning.review import Review, Verdict
from spardl.planning.survey import Survey, begin_with, conduct_survey
from spardl.transport.choice import transport_named
from spardl.transport.members import Group
from spardl.update import LocalUpdates


class AutoLocalSync(LocalSync):
    """What `attach(update="local", method="auto")` returns: settings that are measured before the first exchange and
    looked at again while training goes on. Arguments as of `LocalSync`; the method of `config` is not looked at."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        config: SyncConfig,
        rule: LocalUpdates,
        *,
        process_group: Group = None,
        **given: Any,
    ) -> None:
        parameters = stepped_parameters(model, optimizers).values()
        self._asked, self._sizes = config, [each.numel() for each in parameters]
        device: torch.device = next(iter(parameters)).device
        self._lines = transport_named(config.transport, process_group, timeout=config.timeout, device=device)
        self.survey: Survey | None = None
        self._candidates: dict[bool, Candidate] = {}  # by whether it is dense
        self._review: Review | None = None
        self._last = 0.0  # when the last exchange began
        chosen = self._choose(rule)
        super().__init__(model, optimizers, chosen, rule, process_group=process_group, **given)
        self._courier.before = self._look

    def _choose(self, rule: LocalUpdates) -> SyncConfig:
        """Measure. Collective, between exchanges."""
        if self._lines.workers == 1 or sum(self._sizes) < self._asked.dense_below:
            return self._asked
        survey = conduct_survey(self._asked, rule, self._lines, self._sizes)
        pick, sparse = begin_with(survey)
        dense = next(each for each in survey.trials if each.is_dense)
        self.survey, self._candidates = survey, {True: dense, False: sparse}
        self._review = Review(survey.exchange(sparse), survey.exchange(dense), pick.is_dense)
        return pick.config

    def _look(self) -> None:
        """An exchange is about to begin."""
        review, now = self._review, time.perf_counter()
        if review is None:
            return
        if self._last:
            review.note(now - self._last)
        self._last = now
        if not review.is_due:
            return
        medians = gather_values(self._lines.gather_texts, review.median)
        verdict = review.decide(sum(medians) / len(medians))
        if verdict is Verdict.SURVEY:
            self._courier.change_over(self._choose(self.rule))
        elif verdict is Verdict.SWITCH:
            self._courier.change_over(self._candidates[review.is_dense].config)

    def state_dict(self) -> dict[str, Any]:
        """As of `LocalSync`, and what was chosen."""
        return {**super().state_dict(), "auto": Candidate(self.config).settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `LocalSync` does, with what was chosen then. Collective; it is looked at again like any choice."""
        ranks = state.get("ranks")
        first = ranks[0] if isinstance(ranks, list) and ranks else state
        settings = first.get("auto") if isinstance(first, Mapping) else None
        if isinstance(settings, Mapping):
            self._settle()
            same = ranks is None or len(ranks) == self._lines.workers
            self._courier.change_over(chosen_then(self._asked, settings, same_ranks=same))
            if self._review is not None:
                self._review.is_dense = self.config.is_dense
        super().load_state_dict(state)
