"""`method="auto"` on a DDP model: measure, choose, and look again while training goes on.

Dense is DDP's own average, with nothing of ours in between, so that where dense is quickest nothing is lost by having
asked: DDP has not even a hook, and loses the one that it had (`drop_comm_hook`). Sparse is a `SparDLState` like any
other. Between the two the model changes over between steps: momentum goes into the accumulator and back to the
optimizer, and what residuals hold is sent before they go.
(This module must not postpone annotations: DDP compares the hook's with the real types.)
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spardl import _torch_private
from spardl.agreement import check_agreement, gather_values
from spardl.config import SyncConfig, configure
from spardl.errors import StateError
from spardl.integrations.ddp import SparDLState
from spardl.integrations.handle import SyncHandle
from spardl.integrations.hooks import Hook
from spardl.integrations.model import dense_parameters, facts_of, members_of
from spardl.integrations.optim.choice import Given, optimizers_of
from spardl.integrations.own_average import OwnAverage, check_clip
from spardl.integrations.setup import with_teams
from spardl.metrics import GroupStats, SyncStats
from spardl.planning.candidates import DENSE, Candidate
from spardl.planning.review import Review, Verdict
from spardl.planning.survey import Survey, begin_with, conduct_survey
from spardl.sync.plan import GroupPlan, plan_group, plan_model
from spardl.sync.session import Observer, Session
from spardl.transport.choice import transport_named
from spardl.transport.members import Group, member_ranks

logger = logging.getLogger(__name__)

AUTO = "auto"
GIVEN = ("density", "clip_norm")  # what a user asks for, and no choice changes
PLACED = ("teams", "order")


def auto_hook(state: "AutoSync", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The hook that DDP is given: by DDP's own average, or by whatever was chosen."""
    return state.take(bucket)


class AutoSync(SyncHandle):
    """What `attach(method="auto")` returns, and `attach(plan=...)` of a plan that says dense. Making one is collective.

    Args:
        model: the DDP model.
        process_group: its ranks.
        given: what `attach` was given beside: optimizer, scaler, settings.
        chooses: whether to measure at all; if not, DDP averages, and that is that.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        process_group: Group = None,
        *,
        optimizer: Given = None,
        config: SyncConfig | None = None,
        chooses: bool = True,
        **given: Any,
    ) -> None:
        self._model, self._group = model, process_group if process_group is not None else model.process_group
        self._given = {"optimizer": optimizer, "scaler": given.pop("scaler", None)}
        team_size, workers = given.pop("team_size", None), len(member_ranks(self._group))
        self._asked = with_teams(configure(config, given), process_group, team_size, workers)
        self._parameters = dense_parameters(model)
        self._sizes = [member.elements for member in members_of(self._parameters)]
        self._elements = sum(self._sizes)
        self._optimizers = optimizers_of(optimizer)
        check_clip(self._asked.clip_norm, self._optimizers)
        self._average = OwnAverage(self._parameters, self._asked.clip_norm)
        self._observers: list[Observer] = []
        self._past = GroupStats("past groups", 0)
        self._steps = self._skipped = 0
        self._inner: SparDLState | None = None
        self._leaving = self._stepped = False
        self._left_at = 0
        self._begun = 0.0  # when the last step did
        self._hooked = False
        device = next(iter(self._parameters.values())).device
        self._transport = transport_named(
            self._asked.transport, self._group, timeout=self._asked.timeout, device=device
        )
        facts = {"parameters": facts_of(self._parameters), "chooses": chooses}
        check_agreement({**self._asked.to_dict(), **facts}, self._transport.gather_texts, "configuration or model")
        self.survey: Survey | None = None
        self._review: Review | None = None
        self._sparse = self._asked
        self._hooks = [model.register_forward_pre_hook(Hook(self._before_forward))]
        self._hooks += [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
        self._hooks += [each.register_step_post_hook(self._note_step) for each in self._optimizers]
        if chooses:
            self._choose()

    # --- choosing -------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Measure, begin with what should be quickest, and let real steps decide. Collective, between steps."""
        transport = self._transport
        if transport.workers == 1 or self._elements < self._asked.dense_below:
            self.become(None)
            return
        survey = conduct_survey(self._asked, None, transport, self._sizes)
        pick, sparse = begin_with(survey)
        self.survey, self._sparse = survey, sparse.config
        dense = next(each for each in survey.trials if each.is_dense)
        self._review = Review(survey.exchange(sparse), survey.exchange(dense), pick.is_dense)
        self.become(None if pick.is_dense else pick.config)

    def become(self, config: SyncConfig | None) -> None:
        """Go on like this, or with None by DDP's own average, from the next step on. Collective, between steps."""
        inner, rank = self._inner, self._transport.rank
        if config is None and inner is not None:
            self._left_at, self._leaving = inner.session.sync.steps, True  # what residuals hold is sent by one more
            inner.detach()
            logger.info("rank %d goes back to DDP's own average", rank)
        elif config is not None and inner is not None:
            change_over(inner, config)
        elif config is not None:
            if not self._hooked:
                self._model.register_comm_hook(self, auto_hook)
                self._hooked = True
            given = {name: value for name, value in self._given.items() if value is not None}
            self._inner = SparDLState(self._model, self._group, config=config, hooked=True, **given)
            for observer in self._observers:
                self._inner.observe(observer)
            logger.info("rank %d goes on with %s", rank, Candidate(config).title)

    def _leave(self) -> None:
        """The last sparse step is over: give back what it needed."""
        assert self._inner is not None
        total = self._inner.stats().total
        self._past.include(total)
        self._steps, self._skipped = self._steps + total.steps, self._skipped + total.skipped
        self._inner.session.end()
        self._inner, self._leaving = None, False
        self._hooked = not _torch_private.drop_comm_hook(self._model)

    def _before_step(self, *_: Any) -> None:
        if self._inner is None:
            self._average.clip()

    def _note_step(self, *_: Any) -> None:
        self._stepped = True
        self._average.count()

    def _before_forward(self, model: DistributedDataParallel, *_: Any) -> None:
        """Between two steps: when nothing that was synchronised waits to be applied."""
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            return
        applied = self._stepped if self._optimizers else all(each.grad is None for each in self._parameters.values())
        if applied:
            self._average.count()
            self._stepped = False
            now = time.perf_counter()
            if self._begun and self._review is not None and not self._leaving:
                self._review.note(now - self._begun)
            self._begun = now
            self._change(model)
        self._average.begin(awaited=not self._hooked)

    def _change(self, model: DistributedDataParallel) -> None:
        """Change over, if it is time for that."""
        if self._leaving and self._inner is not None:
            if self._inner.session.sync.steps > self._left_at:
                self._leave()
        elif self._review is not None and self._review.is_due:
            before, review = self._inner, self._review
            medians = gather_values(self._transport.gather_texts, review.median)
            verdict = review.decide(sum(medians) / len(medians))
            if verdict is Verdict.SURVEY:
                self._choose()
            elif verdict is Verdict.SWITCH:
                self.become(None if review.is_dense else self._sparse)
            if self._inner is not before and self._inner is not None:
                self._inner._before_forward(model)  # its own hook comes too late for this pass

    # --- one step -------------------------------------------------------------------------------------------------

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """What becomes of one bucket."""
        if self._inner is not None:
            return self._inner.submit(bucket)
        return self._average.average(bucket, self._model.process_group)

    # --- the rest of its life -------------------------------------------------------------------------------------

    @property
    def is_dense(self) -> bool:
        """Whether DDP itself averages now."""
        return self._inner is None

    @property
    def session(self) -> Session:  # type: ignore[override]
        """Of the sparse way that is in force.

        Raises:
            StateError: there is none, since DDP itself averages.
        """
        if self._inner is None:
            raise StateError("dense was chosen: DDP averages gradients itself, and there is no session.")
        return self._inner.session

    @property
    def config(self) -> SyncConfig:
        """The settings in force."""
        return self._inner.config if self._inner is not None else self._asked.with_method(DENSE)

    @property
    def plan(self) -> list[GroupPlan]:
        """How groups of parameters are synchronised now."""
        if self._inner is not None:
            return self._inner.plan
        return [plan_group(self.config, members_of(self._parameters), self._transport.workers)]

    def stats(self) -> SyncStats:
        """What was sent and how long it took; what DDP sends itself is counted as of a ring, and not timed."""
        dense = self._average.stats(self._elements, self._transport.workers)
        past = GroupStats("past groups", 0)
        past.include(self._past)
        steps, skipped = self._steps + dense.steps, self._skipped
        if self._inner is None:
            return SyncStats([dense], past, steps, skipped)
        now = self._inner.stats()
        past.include(dense)
        if now.past is not None:
            past.include(now.past)
        return SyncStats(now.groups, past, steps + (now.steps or 0), skipped + (now.skipped or 0))

    def observe(self, observer: Observer) -> None:
        """Call `observer` with a `StepEvent` after each sparse step; of DDP's own average there are none."""
        self._observers.append(observer)
        if self._inner is not None:
            self._inner.observe(observer)

    def state_dict(self) -> dict[str, Any]:
        """What was chosen, and the state of that, of *this rank*: save one file per rank, beside the model."""
        return saved(self._sparse, None if self._inner is None else self._inner.state_dict())

    def gathered_state_dict(self) -> dict[str, Any]:
        """All ranks' states as one, the same on every rank, to be saved by any of them. Collective."""
        return saved(self._sparse, None if self._inner is None else self._inner.gathered_state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was chosen then, from its state. Collective; it is looked at again like any choice.

        Raises:
            StateError: it is of another rank, world or model, or damaged.
        """
        if not {"auto", "sync"} <= set(state):
            raise StateError('this is no state of method="auto"; attach the method that it was saved with.')
        settings, inner = state["auto"], of_ranks(state)
        if inner is None:
            self._forget()
            return
        self._sparse = chosen_then(self._asked, settings, same_ranks="ranks" not in state)
        if self._leaving:
            self._leave()
        self.become(self._sparse)
        if self._review is not None:
            self._review.is_dense = False
        assert self._inner is not None
        self._inner.load_state_dict(inner)

    def _forget(self) -> None:
        """Go back to DDP's own average, without what waits: a state without any has been loaded."""
        if self._inner is not None and not self._leaving:
            self._inner.session.wait()
            for group in self._inner.session.sync.groups:
                group.buffer.values.zero_()
            self.become(None)
        if self._review is not None:
            self._review.is_dense = True

    def detach(self) -> None:
        """Stop choosing, and average densely from the next step on, without clipping. Collective, between steps."""
        self._review = self._average.clip_norm = None
        if self._inner is not None and not self._leaving:
            self.become(None)


def change_over(state: SparDLState, config: SyncConfig) -> None:
    """Synchronise by these settings from the next step on; what waits moves along. Collective, between steps."""
    session = state.session
    session.wait()
    members = [member for plan in session.plan for member in plan.members]
    session.config = config
    session.regroup(plan_model(config, members, session.transport.workers))


def chosen_then(asked: SyncConfig, settings: Any, *, same_ranks: bool) -> SyncConfig:
    """The settings of a state on top of those that were asked for; how other ranks were placed is not for these.

    Raises:
        StateError: they cannot be.
    """
    left_out = GIVEN if same_ranks else (*GIVEN, *PLACED)
    try:
        return configure(asked, {name: value for name, value in dict(settings).items() if name not in left_out})
    except (TypeError, ValueError) as error:
        raise StateError(f"this state was saved with settings that cannot be: {error}") from error


def of_ranks(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of what was chosen: this rank's, or as one those of all ranks of another run (`ranks`)."""
    inner, ranks = state["sync"], state.get("ranks")
    if inner is None or ranks is None:
        return None if inner is None else dict(inner)
    if any(not isinstance(each, Mapping) or each.get("sync") is None for each in ranks):
        raise StateError("the ranks of this state were not synchronised in the same way; save all of them together.")
    return {**inner, "ranks": [each["sync"] for each in ranks]}


def saved(config: SyncConfig, inner: dict[str, Any] | None) -> dict[str, Any]:
    """A state: what was chosen, and the state of that; neither where DDP averages."""
    return {"auto": None if inner is None else Candidate(config).settings(), "sync": inner}
