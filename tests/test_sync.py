"""The synchronizer: groups that change, steps that fail, and what is kept of both."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.accumulator import Momentum
from spardl.agreement import check_agreement
from spardl.collectives.program import Operation
from spardl.config import METHODS, DensitySchedule, SyncConfig
from spardl.errors import ConfigError, ConfigMismatch, PeerError
from spardl.sync import Member, Part, Synchronizer, partition
from threads import PATIENCE, Board, ThreadTransport, on_threads

MEMBERS = [Member("a", 700), Member("b", 60), Member("c", 500)]
EXACT: dict[str, Any] = {"values": "fp32", "dense_below": 0, "teams": 1}


def alone() -> ThreadTransport:
    return ThreadTransport(Board(1), 0)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return {member.name: torch.randn(member.elements, generator=source) for member in MEMBERS}


def run_step(sync: Synchronizer, given: dict[str, Tensor], **options: Any) -> bool:
    """Synchronise all groups; the averages replace the gradients in `given`."""
    sync.begin(**options)
    for group in sync.groups:
        sync.synchronize(group, [Part(member.name, given[member.name]) for member in group.members])
    return sync.finish()


def kept(sync: Synchronizer) -> dict[str, Tensor]:
    residuals: dict[str, Tensor] = sync.state_dict()["residuals"]
    return residuals


def state_with(**values: Tensor) -> dict[str, Any]:
    """A state with these residuals, and velocities twice as large."""
    doubled = {name: 2 * value for name, value in values.items()}
    return {"version": 1, "steps": 3, "residuals": values, "velocities": doubled, "groups": [], "methods": []}


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
        sync = Synchronizer(SyncConfig(blocks=blocks, **EXACT), transport, momentum=True)
        sync.regroup([MEMBERS])
        sync.load_state_dict(state_with(**given))
        seen = []
        for groups in ([[c], [a, b]], [[b], [c, a]], [[a], [b], [c]]):
            sync.regroup(groups)
            seen.append(sync.state_dict())
        sync.group_of([c, b])
        seen.append(sync.state_dict())
        return seen

    for states in on_threads(3, visit):
        for state in states:
            for name, value in given.items():
                assert torch.equal(state["residuals"][name], value)
                assert torch.equal(state["velocities"][name], 2 * value)
        assert states[-1]["groups"] == [["a"], ["c", "b"]]


def test_a_group_is_made_once() -> None:
    """Asking again for the same members, in any order, gives the same group."""
    sync = Synchronizer(SyncConfig(**EXACT), alone())
    first = sync.group_of(MEMBERS)
    assert sync.group_of(MEMBERS[::-1]) is first
    assert len(sync.groups) == 1


# --- steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_lost_by_any_method(method: str) -> None:
    """Over chained steps in two groups, all that was put in came out on all ranks, the same bits, or is still there."""
    workers, steps = 3, 4

    def visit(transport: ThreadTransport) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        sync = Synchronizer(SyncConfig(method=method, density=0.05, **EXACT), transport)
        sync.regroup([MEMBERS[:2], MEMBERS[2:]])
        out = {member.name: torch.zeros(member.elements, dtype=torch.float64) for member in MEMBERS}
        for step in range(steps):
            given = gradients(transport.rank, step)
            assert run_step(sync, given)
            for name, average in given.items():
                out[name] += average.double()
        return out, kept(sync)

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
        sync = Synchronizer(SyncConfig(method=method, density=0.05, **EXACT), transport)
        sync.regroup([MEMBERS[:2], MEMBERS[2:]])
        same = []
        for step in range(5):
            before, given = sync.state_dict(), gradients(transport.rank, step)
            if step in (0, 3) and transport.rank == 1:
                given[poisoned][7] = torch.inf
            counted = run_step(sync, given)
            if step in (0, 3):
                assert not counted
                assert all(bool(value.isnan().all()) for value in given.values())
                after = sync.state_dict()
                same.append(str(before["methods"]) == str(after["methods"]))
                same.append(all(torch.equal(before["residuals"][m.name], kept(sync)[m.name]) for m in MEMBERS))
            else:
                assert counted
        return same

    for same in on_threads(3, visit):
        assert same == [True] * 4, "first step: controllers, residuals; fourth step: controllers, residuals"


def test_a_dense_step_sends_all_that_waited() -> None:
    """When the density schedule or `go_dense` comes to 1, residuals join the gradient in full and nothing stays."""

    def visit(transport: ThreadTransport) -> dict[str, Any]:
        schedule = DensitySchedule(0.05, steps=0)
        sync = Synchronizer(SyncConfig(density=schedule, **EXACT), transport)
        sync.regroup([MEMBERS])
        run_step(sync, gradients(transport.rank, 0))
        waiting = kept(sync)
        sync.go_dense()
        given = gradients(transport.rank, 1)
        run_step(sync, given)
        return {"waiting": waiting, "average": given, "left": kept(sync)}

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
        sync = Synchronizer(SyncConfig(density=0.1, **EXACT), transport, momentum=True)
        sync.regroup([MEMBERS])
        rule = {member.name: Momentum(torch.zeros(member.elements), 0.9, 0.0, 1.0, False) for member in MEMBERS}
        sync.load_state_dict(state_with(**gradients(transport.rank, 0)))
        before = sync.state_dict()
        given = gradients(transport.rank, 1)
        given["b"].zero_()
        sync.begin()
        parts = [Part(name, value, rule[name], unused=name == "b") for name, value in given.items()]
        sync.synchronize(sync.groups[0], parts)
        assert sync.finish()
        return before, sync.state_dict(), given["b"]

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
    sync = Synchronizer(SyncConfig(**EXACT), Breaking(Board(1), 0))
    sync.regroup([MEMBERS[:2], MEMBERS[2:]])
    sync.load_state_dict({**state_with(**gradients(0, 0)), "velocities": {}})
    before = sync.state_dict()
    with pytest.raises(PeerError, match=r"rank 1 is gone\.") as caught:
        run_step(sync, gradients(0, 1))
    assert caught.value.__notes__ == ["while synchronising the group c"]
    after = sync.state_dict()
    assert before["steps"] == after["steps"]
    for name, residual in before["residuals"].items():
        assert torch.equal(residual, after["residuals"][name])
    assert run_step(sync, gradients(0, 1)), "the next step works again"


@pytest.mark.parametrize("density", [0.01, 1.0])
def test_an_average_too_large_for_its_gradient_refuses_the_step(density: float) -> None:
    """Where a residual and its gradient overflow 16 bits together, nothing is lost: all ranks skip, and try again.

    With loss scaling that is what happens to large residuals first, and a smaller scale then lets them through.
    """

    def visit(transport: ThreadTransport) -> tuple[bool, bool, Tensor, bool]:
        sync = Synchronizer(SyncConfig(density=density, **EXACT), transport)
        sync.regroup([MEMBERS])
        residuals = {member.name: torch.zeros(member.elements) for member in MEMBERS}
        residuals["a"][5] = 60_000.0
        sync.load_state_dict({**state_with(**residuals), "velocities": {}})
        given = {name: torch.full_like(value, 1e-3).half() for name, value in residuals.items()}
        counted = run_step(sync, given, scale=2.0)
        untouched = all(torch.equal(residuals[name], value) for name, value in kept(sync).items())
        everywhere = all(bool(value.isnan().all()) for value in given.values())
        given = {name: torch.full_like(value, 1e-3).half() for name, value in residuals.items()}
        run_step(sync, given, scale=0.5)
        return counted, untouched and everywhere, given["a"][5], bool(kept(sync)["a"][5] < 1)

    for counted, untouched, delivered, sent in on_threads(2, visit):
        assert not counted
        assert untouched
        assert float(delivered) == pytest.approx(30_000, rel=1e-3)
        assert sent


def test_times_add_up_to_what_the_steps_took() -> None:
    """Selecting, packing, waiting and transferring are all the time that a group spends, and no more."""

    def visit(transport: ThreadTransport) -> tuple[float, float]:
        sync = Synchronizer(SyncConfig(density=0.1, **EXACT), transport)
        sync.regroup([MEMBERS])
        given = [gradients(transport.rank, step) for step in range(20)]
        started = time.perf_counter()
        for each in given:
            run_step(sync, each)
        elapsed = time.perf_counter() - started
        total = sync.stats().total
        assert min(total.seconds_selecting, total.seconds_packing) > 0
        return elapsed, (
            total.seconds_selecting + total.seconds_packing + total.seconds_waiting + total.seconds_transferring
        )

    for elapsed, accounted in on_threads(2, visit):
        assert 0.5 * elapsed < accounted <= elapsed


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
    sync = Synchronizer(SyncConfig(**EXACT), alone())
    for nonsense in ({}, {"version": 2}, "state", None):
        with pytest.raises(ConfigError, match="spardl here reads version 1"):
            sync.load_state_dict(nonsense)  # type: ignore[arg-type]


def test_gradients_may_be_added_ahead_of_other_groups_exchanges() -> None:
    """One after the other, or all accumulated before the first is exchanged: the same bits."""

    def visit(transport: ThreadTransport) -> list[list[Tensor]]:
        results = []
        for ahead in (False, True):
            sync = Synchronizer(SyncConfig(density=0.1, dense_below=0), transport)
            sync.regroup([[Member("a", 300)], [Member("b", 500)]])
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(3):
                parts = [
                    [Part(name, torch.randn(size, generator=generator))] for name, size in (("a", 300), ("b", 500))
                ]
                sync.begin()
                if ahead:
                    for group, part in zip(sync.groups, parts, strict=True):
                        sync.accumulate(group, part)
                for group, part in zip(sync.groups, parts, strict=True):
                    if not ahead:
                        sync.accumulate(group, part)
                    sync.exchange(group)
                assert sync.finish()
            results.append([parts[0][0].gradient, parts[1][0].gradient, *(g.memory.acc.values for g in sync.groups)])
        return results

    for plain, ahead in on_threads(2, visit):
        assert all(torch.equal(one, other) for one, other in zip(plain, ahead, strict=True))


def test_what_was_added_ahead_is_undone_when_the_step_is_abandoned() -> None:
    def visit(transport: ThreadTransport) -> bool:
        sync = Synchronizer(SyncConfig(density=0.1, dense_below=0), transport)
        sync.regroup([[Member("a", 300)], [Member("b", 500)]])
        for step in range(2):
            sync.begin()
            before = [group.memory.acc.values.clone() for group in sync.groups]
            for group in sync.groups:
                sync.accumulate(group, [Part(group.members[0].name, torch.randn(group.members[0].elements))])
            sync.exchange(sync.groups[0])
            if step:
                sync.abandon()
            else:
                sync.exchange(sync.groups[1])
                sync.finish()
        return all(torch.equal(old, group.memory.acc.values) for old, group in zip(before, sync.groups, strict=True))

    assert all(on_threads(2, visit))
