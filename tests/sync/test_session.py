"""The session: groups that change, steps that fail, and what is kept of both."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.agreement import check_agreement
from spardl.collectives.methods.registry import METHODS
from spardl.collectives.program import Operation
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import ConfigMismatch, PeerError, StateError
from spardl.memory.velocity import Momentum
from spardl.metrics import StepEvent
from spardl.sync.plan import GroupPlan, Member, densely, partition, plan_group
from spardl.sync.session import Session, clip_factor
from spardl.sync.step import Part
from spardl.transport.base import Transport
from threads import PATIENCE, Board, ThreadTransport, on_threads

MEMBERS = [Member("a", 700), Member("b", 60), Member("c", 500)]
EXACT: dict[str, Any] = {"values": "fp32", "dense_below": 0}


def settings_of(method: str, **more: Any) -> SyncConfig:
    return SyncConfig(method=method, **EXACT, **more, **({"teams": 1} if method == "spardl" else {}))


def planned(config: SyncConfig, transport: Transport, *groups: list[Member]) -> list[GroupPlan]:
    """Groups as configured; also a single worker keeps the configured method."""
    return [plan_group(config, members, max(2, transport.workers)) for members in groups]


def opened(transport: Transport, *groups: list[Member], config: SyncConfig | None = None, **more: Any) -> Session:
    config = config or settings_of("spardl")
    return Session(transport, config, planned(config, transport, *(groups or (MEMBERS,))), **more)


def alone() -> ThreadTransport:
    return ThreadTransport(Board(1), 0)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return {member.name: torch.randn(member.elements, generator=source) for member in MEMBERS}


def run_step(session: Session, given: dict[str, Tensor], **options: Any) -> bool:
    """Synchronise all groups; the averages replace the gradients in `given`."""
    session.begin(**options)
    for name, gradient in given.items():
        session.submit(name, gradient)
    return session.close().result(60)


def kept(session: Session) -> dict[str, Tensor]:
    residuals: dict[str, Tensor] = session.state_dict()["residuals"]
    return residuals


def state_with(session: Session, *, moving: bool = True, **values: Tensor) -> dict[str, Any]:
    """The session's state with these residuals, and velocities twice as large."""
    doubled = {name: 2 * value for name, value in values.items()} if moving else {}
    return {**session.state_dict(), "steps": 3, "residuals": values, "velocities": doubled}


# --- groups ------------------------------------------------------------------------------------------------------


def test_partition_fills_groups_up_to_the_limit() -> None:
    """Members stay in order; a group holds as many as fit, and a member larger than the limit stands alone."""
    members = [Member(name, size) for name, size in zip("abcdef", (3, 4, 2, 50, 1, 9), strict=True)]
    names = ["".join(member.name for member in group) for group in partition(members, 9)]
    assert names == ["abc", "d", "e", "f"]
    assert partition([], 9) == []


@pytest.mark.parametrize("blocks", ["interleaved", "contiguous"])
def test_regrouping_moves_residuals_and_velocities_bit_for_bit(blocks: Any) -> None:
    """However parameters are grouped and regrouped, each keeps what was its own."""
    given = {member.name: torch.randn(member.elements) for member in MEMBERS}
    a, b, c = MEMBERS

    def visit(transport: ThreadTransport) -> list[dict[str, Any]]:
        config = settings_of("spardl", blocks=blocks)
        session = opened(transport, config=config, momentum=True)
        session.load_state_dict(state_with(session, **given))
        seen = []
        for groups in ([[c], [a, b]], [[b], [c, a]], [[a], [b], [c]]):
            session.regroup(planned(config, transport, *groups))
            seen.append(session.state_dict())
        session.include(planned(config, transport, [c, b])[0])
        seen.append(session.state_dict())
        return seen

    for states in on_threads(3, visit):
        for state in states:
            for name, value in given.items():
                assert torch.equal(state["residuals"][name], value)
                assert torch.equal(state["velocities"][name], 2 * value)
        assert states[-1]["groups"] == [["a"], ["c", "b"]]


# --- steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_lost_by_any_method(method: str) -> None:
    """Over chained steps in two groups, all that was put in came out on all ranks, the same bits, or is still there."""
    workers, steps = 3, 4

    def visit(transport: ThreadTransport) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        session = opened(transport, MEMBERS[:2], MEMBERS[2:], config=settings_of(method, density=0.05))
        out = {member.name: torch.zeros(member.elements, dtype=torch.float64) for member in MEMBERS}
        for step in range(steps):
            given = gradients(transport.rank, step)
            assert run_step(session, given)
            for name, average in given.items():
                out[name] += average.double()
        return out, kept(session)

    ranks = on_threads(workers, visit)
    for member in MEMBERS:
        put_in = sum(gradients(rank, step)[member.name].double() for rank in range(workers) for step in range(steps))
        left = sum(residuals[member.name].double() for _, residuals in ranks)
        for rank, (out, _) in enumerate(ranks):
            assert torch.equal(out[member.name], ranks[0][0][member.name]), f"rank {rank} has other bits"
            difference = put_in - (workers * out[member.name] + left)
            assert float(difference.abs().max()) < 1e-4, f"rank {rank}, {member.name}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poisoned", ["a", "c"])
def test_a_skipped_step_leaves_every_method_as_it_was(method: str, poisoned: str) -> None:
    """An infinity on one rank, in one of two groups, is NaN on all; residuals and controllers do not notice.

    In the first step, when controllers begin, and later; training goes on as if the step had not been.
    """

    def visit(transport: ThreadTransport) -> list[bool]:
        session = opened(transport, MEMBERS[:2], MEMBERS[2:], config=settings_of(method, density=0.05))
        same = []
        for step in range(5):
            before, given = session.state_dict(), gradients(transport.rank, step)
            if step in (0, 3) and transport.rank == 1:
                given[poisoned][7] = torch.inf
            counted = run_step(session, given)
            if step in (0, 3):
                assert not counted
                assert all(bool(value.isnan().all()) for value in given.values())
                after = session.state_dict()
                same.append(str(before["methods"]) == str(after["methods"]))
                same.append(all(torch.equal(before["residuals"][m.name], kept(session)[m.name]) for m in MEMBERS))
            else:
                assert counted
        return same

    for same in on_threads(3, visit):
        assert same == [True] * 4, "first step: controllers, residuals; fourth step: controllers, residuals"


def test_a_dense_step_sends_all_that_waited() -> None:
    """Once everything is sent, residuals join the gradient in full and nothing stays."""

    def visit(transport: ThreadTransport) -> dict[str, Any]:
        session = opened(transport, config=settings_of("spardl", density=DensitySchedule(0.05, steps=0)))
        run_step(session, gradients(transport.rank, 0))
        waiting = kept(session)
        session.regroup([densely(plan) for plan in session.plan])
        given = gradients(transport.rank, 1)
        run_step(session, given)
        return {"waiting": waiting, "average": given, "left": kept(session)}

    ranks = on_threads(2, visit)
    for member in MEMBERS:
        name = member.name
        expected = sum(rank["waiting"][name] + gradients(i, 1)[name] for i, rank in enumerate(ranks)) / 2
        for rank in ranks:
            assert torch.allclose(rank["average"][name], expected, atol=1e-6)
            assert not rank["left"][name].any()


def test_an_unused_part_sits_the_step_out() -> None:
    """Its residual and velocity stay as they are while the other parts of its group are synchronised."""

    def visit(transport: ThreadTransport) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
        session = opened(transport, config=settings_of("spardl", density=0.1), momentum=True)
        rule = {member.name: Momentum(torch.zeros(member.elements), 0.9, 0.0) for member in MEMBERS}
        session.load_state_dict(state_with(session, **gradients(transport.rank, 0)))
        before = session.state_dict()
        given = gradients(transport.rank, 1)
        given["b"].zero_()
        session.begin(skips=True)
        for name, value in given.items():
            session.submit(name, value, momentum=rule[name], unused=name == "b")
        assert session.close().result(60)
        return before, session.state_dict(), given["b"]

    for before, after, received in on_threads(2, visit):
        for kind in ("residuals", "velocities"):
            assert torch.equal(before[kind]["b"], after[kind]["b"])
            assert not torch.equal(before[kind]["a"], after[kind]["a"])
        assert not received.any()


class Breaking(ThreadTransport):
    """Fails at the second operation."""

    operations = 0

    def perform(self, operation: Operation) -> Any:
        self.operations += 1
        if self.operations == 2:
            raise PeerError("rank 1 is gone.", peer=1)
        return super().perform(operation)


def test_a_failure_in_one_group_undoes_the_others() -> None:
    """When the second of two groups fails, the first is rolled back as well, and the error says where it was."""
    session = opened(Breaking(Board(1), 0), MEMBERS[:2], MEMBERS[2:], config=settings_of("dense"))
    session.load_state_dict(state_with(session, moving=False, **gradients(0, 0)))
    before = session.state_dict()
    with pytest.raises(PeerError, match=r"rank 1 is gone\.") as caught:
        run_step(session, gradients(0, 1))
    assert caught.value.__notes__ == ["while synchronising the group c"]
    after = session.state_dict()
    assert before["steps"] == after["steps"]
    for name, residual in before["residuals"].items():
        assert torch.equal(residual, after["residuals"][name])
    with pytest.raises(PeerError, match=r"rank 1 is gone\."):
        session.begin()


@pytest.mark.parametrize("density", [0.01, 1.0])
def test_an_average_too_large_for_its_gradient_refuses_the_step(density: float) -> None:
    """Where a residual and its gradient overflow 16 bits together, nothing is lost: all ranks skip, and try again.

    With loss scaling that is what happens to large residuals first, and a smaller scale then lets them through.
    """

    def visit(transport: ThreadTransport) -> tuple[bool, bool, Tensor, bool]:
        session = opened(transport, config=settings_of("spardl", density=density))
        residuals = {member.name: torch.zeros(member.elements) for member in MEMBERS}
        residuals["a"][5] = 60_000.0
        session.load_state_dict(state_with(session, moving=False, **residuals))
        given = {name: torch.full_like(value, 1e-3).half() for name, value in residuals.items()}
        counted = run_step(session, given, scale=2.0)
        untouched = all(torch.equal(residuals[name], value) for name, value in kept(session).items())
        everywhere = all(bool(value.isnan().all()) for value in given.values())
        given = {name: torch.full_like(value, 1e-3).half() for name, value in residuals.items()}
        run_step(session, given, scale=0.5)
        return counted, untouched and everywhere, given["a"][5], bool(kept(session)["a"][5] < 1)

    for counted, untouched, delivered, sent in on_threads(2, visit):
        assert not counted
        assert untouched
        assert float(delivered) == pytest.approx(30_000, rel=1e-3)
        assert sent


def test_every_kind_of_time_is_counted() -> None:
    """A group's seconds are those of its own thread, so together they are no more than its steps took by the clock."""

    def visit(transport: ThreadTransport) -> tuple[float, float]:
        session = opened(transport, config=settings_of("spardl", density=0.1))
        for step in range(5):
            run_step(session, gradients(transport.rank, step))
        total = session.stats().total
        assert min(total.seconds_selecting, total.seconds_packing) > 0
        accounted = total.seconds_selecting + total.seconds_packing
        accounted += total.seconds_waiting + total.seconds_transferring
        return sum(event.seconds for event in session.events), accounted

    for elapsed, accounted in on_threads(2, visit):
        assert accounted <= elapsed


def test_totals_never_go_back_and_observers_hear_of_every_step() -> None:
    """Groups count from when they were formed; the total counts from the beginning."""

    def visit(transport: ThreadTransport) -> tuple[list[int], list[int], list[StepEvent]]:
        config = settings_of("spardl", density=0.1)
        session, heard = opened(transport, config=config), []
        session.observers.append(heard.append)
        sent, steps = [], []
        for step in range(4):
            if step == 2:
                session.regroup(planned(config, transport, MEMBERS[:2], MEMBERS[2:]))
            run_step(session, gradients(transport.rank, step))
            total = session.stats().total
            sent.append(total.bytes_sent)
            steps.append(total.steps)
        return sent, steps, heard

    for sent, steps, heard in on_threads(2, visit):
        assert sent == sorted(sent) and len(set(sent)) == 4
        assert steps == [1, 2, 3, 4]
        assert [(event.step, event.groups, event.counted) for event in heard] == [
            (0, 1, True), (1, 1, True), (2, 2, True), (3, 2, True)
        ]  # fmt: skip
        assert sum(event.bytes_sent for event in heard) == sent[-1]
        assert all(event.elements == 1260 and event.density == pytest.approx(0.1, rel=0.02) for event in heard)


def test_the_log_tells_once_at_open_and_at_each_change_who_does_what(caplog: pytest.LogCaptureFixture) -> None:
    """Transport, teams, groups, and what went dense and why."""
    config = SyncConfig(dense_below=100)
    with caplog.at_level("INFO", logger="spardl.sync.session"):
        session = Session(alone(), config, [plan_group(config, MEMBERS, 2)])
        session.regroup([plan_group(config, [member], 2) for member in MEMBERS])
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        "rank 0 of 1 in 1 team(s) over ThreadTransport: 1 group(s) of 1260 elements in all by spardl"
    )
    assert "dense" not in first and "3 group(s)" in second and "; 1 of them dense (" in second


def test_groups_start_when_they_are_complete_and_in_order() -> None:
    """Submitted in any order, on each rank another: the same bits as in the order of the groups."""

    def visit(transport: ThreadTransport) -> list[dict[str, Tensor]]:
        found = []
        for overlap in (False, True):
            for turn in (0, transport.rank):
                session = opened(transport, MEMBERS[:1], MEMBERS[1:], overlap=overlap)
                for step in range(3):
                    given = gradients(transport.rank, step)
                    names = list(given)
                    for name in names[turn:] + names[:turn]:
                        session.submit(name, given[name])
                    assert session.close().result(60)
                session.end(keep_transport=True)
                found.append(given | kept(session))
        return found

    for found in on_threads(3, visit):
        for other in found[1:]:
            assert all(torch.equal(found[0][name], other[name]) for name in other)


def test_a_tensor_that_was_not_submitted_fails_the_step_by_name() -> None:
    session = opened(alone())
    session.submit("a", torch.zeros(700))
    with pytest.raises(StateError, match="'b' was not submitted"):
        session.close().result(60)


def test_one_tensor_is_reduced_and_committed_alone() -> None:
    """A group that does not come stays as it was; steps are counted by each group."""

    def visit(transport: ThreadTransport) -> tuple[Tensor, dict[str, Tensor]]:
        config = settings_of("spardl", density=0.1)
        groups = planned(config, transport, *([member] for member in MEMBERS))
        session = Session(transport, config, groups, commit="group")
        given = gradients(transport.rank, 0)
        assert session.reduce("a", given["a"])
        broken = torch.full((500,), torch.inf if transport.rank == 1 else 1.0)
        assert not session.reduce("c", broken)
        assert broken.isnan().all()
        return given["a"], kept(session)

    ranks = on_threads(2, visit)
    expected = sum(gradients(rank, 0)["a"] for rank in range(2))
    left = sum(residuals["a"] for _, residuals in ranks)
    for average, residuals in ranks:
        assert torch.allclose(2 * average + left, expected, atol=1e-5)
        assert not residuals["b"].any() and not residuals["c"].any()


def test_the_norm_of_the_whole_model_is_clipped() -> None:
    """Over all groups together, to sqrt(P) times the norm on each rank, before anything is sent."""

    def visit(transport: ThreadTransport) -> dict[str, Tensor]:
        config = settings_of("dense", clip_norm=3.0)
        session = opened(transport, *([member] for member in MEMBERS), config=config)
        given = gradients(transport.rank, 0)
        run_step(session, given)
        return given

    own = [torch.cat(list(gradients(rank, 0).values())) for rank in range(2)]
    expected = sum(each * (3.0 * 2**0.5 / each.norm()) for each in own) / 2
    for found in on_threads(2, visit):
        assert torch.allclose(torch.cat(list(found.values())), expected, atol=1e-6)


def test_what_was_synchronised_before_is_neither_sent_nor_averaged_again() -> None:
    """A gradient that holds an earlier result has it afterwards too; only what is new takes part."""

    def visit(transport: ThreadTransport) -> list[bool]:
        same = []
        for density in (0.1, 1.0):
            session, plain = (opened(transport, config=settings_of("spardl", density=density)) for _ in range(2))
            base = torch.linspace(-1, 1, 700)
            given, alone = gradients(transport.rank, 0), gradients(transport.rank, 0)
            given["a"] += base
            session.begin()
            for name, gradient in given.items():
                session.submit(name, gradient, base=base if name == "a" else None)
            assert session.close().result(60)
            run_step(plain, alone)
            same.append(torch.allclose(given["a"], alone["a"] + base, atol=1e-6))
            same.append(torch.allclose(kept(session)["a"], kept(plain)["a"], atol=1e-6))
        return same

    assert on_threads(2, visit) == [[True] * 4] * 2


# --- state -------------------------------------------------------------------------------------------------------


def saved(transport: ThreadTransport) -> dict[str, Any]:
    session = opened(transport, config=settings_of("spardl", density=0.05))
    for step in range(2):
        run_step(session, gradients(transport.rank, step))
    return session.gathered_state_dict()


def test_a_gathered_state_is_every_ranks_own_and_conserves_the_mean_elsewhere() -> None:
    """The same on all ranks; in a world of another size each rank starts from the mean residual."""
    states = on_threads(3, saved)

    def loaded(transport: ThreadTransport) -> dict[str, Tensor]:
        session = opened(transport, config=settings_of("spardl", density=0.05))
        session.load_state_dict(states[transport.rank % 3])
        assert session.sync.steps == 2
        return kept(session)

    for workers in (2, 3, 5):
        held = on_threads(workers, loaded)
        for name in ("a", "b", "c"):
            own = [each["residuals"][name] for each in states[0]["ranks"]]
            for rank, residuals in enumerate(held):
                expected = own[rank] if workers == 3 else sum(each.double() for each in own).float() / 3
                assert torch.allclose(residuals[name], expected, rtol=0, atol=0 if workers == 3 else 1e-6)


def damaged(state: dict[str, Any], kind: str) -> object:
    if kind == "rank":
        return {**state, "rank": 5}
    if kind == "world":
        return {**state, "workers": 5}
    if kind == "steps":
        return {**state, "steps": -1}
    if kind == "missing":
        return {**state, "residuals": {"a": torch.zeros(700)}}
    if kind == "length":
        return {**state, "residuals": {**state["residuals"], "a": torch.zeros(3)}}
    if kind == "nan":
        return {**state, "residuals": {**state["residuals"], "a": torch.full((700,), torch.nan)}}
    if kind == "type":
        return {**state, "residuals": {**state["residuals"], "a": "zeros"}}
    if kind == "method":
        return {**state, "methods": [{"top": {"budget": 10**9}}]}
    if kind == "momentum":
        return {**state, "velocities": state["residuals"]}
    return {**state, "groups": "all"}


KINDS = ("rank", "world", "steps", "missing", "length", "nan", "type", "method", "momentum", "groups")


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(kind: str) -> None:
    session = opened(alone())
    session.load_state_dict(state_with(session, moving=False, **gradients(0, 0)))
    before = session.state_dict()
    with pytest.raises(StateError):
        session.load_state_dict(damaged(before, kind))  # type: ignore[arg-type]
    after = session.state_dict()
    assert after["steps"] == before["steps"] and after["methods"] == before["methods"]
    assert all(torch.equal(before["residuals"][name], after["residuals"][name]) for name in before["residuals"])


def test_ranks_that_are_at_different_steps_are_told_so() -> None:
    """Files of different steps would make them send different amounts."""

    def visit(transport: ThreadTransport) -> str:
        session = opened(transport)
        session.load_state_dict({**session.state_dict(), "steps": 7 + transport.rank})
        with pytest.raises(ConfigMismatch) as caught:
            run_step(session, gradients(transport.rank, 0))
        return str(caught.value)

    for told in on_threads(2, visit):
        assert "steps so far is 7 on rank 0 and 8 on rank 1" in told


def test_a_session_that_has_ended_says_so() -> None:
    session = opened(alone())
    session.end()
    with pytest.raises(StateError, match="open another one"):
        session.begin()
    assert kept(session).keys() == {"a", "b", "c"}, "its state can still be saved"


# --- agreement ---------------------------------------------------------------------------------------------------


def agreement(*facts: dict[str, Any]) -> list[str]:
    """What each rank is told when the ranks bring these facts."""
    texts, barrier = [""] * len(facts), threading.Barrier(len(facts))

    def visit(transport: ThreadTransport) -> str:
        def gather(text: str) -> list[str]:
            texts[transport.rank] = text
            barrier.wait(PATIENCE)
            everyone = list(texts)
            barrier.wait(PATIENCE)
            return everyone

        try:
            check_agreement(facts[transport.rank], gather, "settings")
        except ConfigMismatch as error:
            return f"{error.ranks}: {error}"
        return "agreed"

    return on_threads(len(facts), visit)


def test_agreement_names_two_ranks_and_the_first_difference() -> None:
    """All ranks hear the same. Of long lists only the place where they part is shown; 1 and 1.0 agree."""
    facts = {"density": 1, "names": ["a", "b"]}
    assert agreement(facts, {"density": 1.0, "names": ["a", "b"]}) == ["agreed"] * 2
    told = agreement(facts, facts, {"density": 1, "names": ["a", "c"]})
    text = "(0, 2): ranks 0 and 2 differ in settings: names is 'b' on rank 0 and 'c' on rank 2;"
    assert [each.startswith(text) for each in told] == [True] * 3, told
    assert "names is 2 items on rank 0 and 1 items on rank 1" in agreement(facts, {"density": 1, "names": ["a"]})[0]


def test_a_state_without_our_version_is_refused() -> None:
    """Something that is no state at all gets a sentence too."""
    session = opened(alone())
    for nonsense in ({}, {"version": 1}, "state", None):
        with pytest.raises(StateError, match="spardl here reads version 2"):
            session.load_state_dict(nonsense)  # type: ignore[arg-type]


def test_one_large_entry_is_clipped_and_not_the_whole_gradient_zeroed() -> None:
    """The square of 1e20 is beyond float32."""
    gradient = torch.tensor([1e20, 3.0])
    factor = clip_factor([Part("w", gradient)], 1.0, 1.0)
    assert factor == pytest.approx(1e-20)
