"""`method="auto"`: ranks choose alike, and changing over between dense and sparse loses nothing."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from spardl.errors import ConfigError, StateError
from spardl.integrations import auto
from spardl.planning import survey
from spardl.planning.planfile import PlanFile, digest_of
from spardl.planning.review import Verdict
from training import EXACT, all_equal, loss_of, mlp, sgd, train, weights_of

AUTO = {**EXACT, "method": "auto", "density": 0.05}


@contextlib.contextmanager
def short_trials():
    with mock.patch.object(survey, "QUICK_S", 0.05):
        yield


def attached(settings=None, **more):
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model, momentum=0.9)
    with short_trials():
        sync = spardl.attach(model, optimizer=optimizer, **{**AUTO, **(settings or {}), **more})
    return model, optimizer, sync


def turn(sync, *, dense):
    """Let the next look at measured steps come to this."""
    sync._review.settled = None
    sync._review.is_dense = dense
    sync._review._steps = [0.0] * 10
    sync._review.decide = lambda _: Verdict.SWITCH if sync.is_dense != dense else Verdict.STAY


def chosen_by_itself(rank, workers):
    model, optimizer, sync = attached()
    train(model, optimizer, range(30))
    return weights_of(model), sync.is_dense, sync.survey.links, sync.stats().total.steps


def test_all_ranks_measure_choose_and_train_alike() -> None:
    outcomes = on_processes(3, chosen_by_itself)
    assert all_equal(weights for weights, *_ in outcomes)
    assert len({kind for _, kind, *_ in outcomes}) == 1
    assert all(links == outcomes[0][2] for *_, links, _ in outcomes)
    assert all(steps == 30 for *_, steps in outcomes)


def there_and_back(rank, workers):
    """Dense, sparse, dense, sparse; what each step was, and what the optimizer has of momentum in the end."""
    model, optimizer, sync = attached()
    kinds = []
    for stage, dense in enumerate((True, False, True, False)):
        turn(sync, dense=dense)
        for step in range(4):
            train(model, optimizer, [10 * stage + step])
            kinds.append((stage, sync.is_dense))
    shown = optimizer.state_dict()["param_groups"][0]["momentum"]
    turn(sync, dense=True)
    train(model, optimizer, range(50, 54))
    moments = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return weights_of(model), kinds, shown, moments, optimizer.param_groups[0]["momentum"], sync.is_dense


def test_changing_over_keeps_ranks_together_and_momentum_where_it_belongs() -> None:
    outcomes = on_processes(2, there_and_back)
    assert all_equal(weights for weights, *_ in outcomes)
    for _, kinds, shown, moments, momentum, is_dense in outcomes:
        assert [dense for stage, dense in kinds if stage == 1][-1] is False
        assert [dense for stage, dense in kinds if stage == 2][-1] is True
        assert shown == momentum == 0.9 and is_dense and all(bool(each.any()) for each in moments)


def dense_against_ddp(rank, workers):
    """Weights after the same steps by DDP alone and by auto that has chosen dense; then one step that leaves sparse."""
    plain = DistributedDataParallel(mlp())
    train(plain, sgd(plain, momentum=0.9), range(6))
    model, optimizer, sync = attached()
    turn(sync, dense=True)
    if not sync.is_dense:
        sync._forget()
    train(model, optimizer, range(6))
    return weights_of(plain), weights_of(model), sync.is_dense


def test_dense_is_what_ddp_does() -> None:
    with mock.patch.object(auto, "begin_with", lambda found: (next(iter(found.trials)), list(found.trials)[1])):
        outcomes = on_processes(2, dense_against_ddp)
    for plain, chosen, is_dense in outcomes:
        assert is_dense and all_equal([plain, chosen])


def clipped_against_ddp(rank, workers):
    """Weights after the same steps by DDP with clipped gradients, and by auto that has chosen dense; the last norm."""
    plain = DistributedDataParallel(mlp())
    optimizer = sgd(plain, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(plain, rank, step).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
    model, optimizer, sync = attached(clip_norm=0.01)
    turn(sync, dense=True)
    train(model, optimizer, range(6))
    norms = torch.linalg.vector_norm(torch.cat([each.grad.flatten() for each in model.parameters()]))
    return weights_of(plain), weights_of(model), sync.is_dense, float(norms)


def test_where_dense_is_chosen_its_average_is_clipped() -> None:
    with mock.patch.object(auto, "begin_with", lambda found: (next(iter(found.trials)), list(found.trials)[1])):
        outcomes = on_processes(2, clipped_against_ddp)
    for plain, chosen, is_dense, norm in outcomes:
        assert is_dense and norm <= 0.0101
        torch.testing.assert_close(chosen, plain, rtol=1e-6, atol=1e-8)


def back_to_dense(rank, workers):
    """A gradient by auto that has been sparse and is dense again, in several buckets, with no hook; and the mean."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
    optimizer = sgd(model, momentum=0.9)
    with short_trials():
        sync = spardl.attach(model, optimizer=optimizer, **AUTO)
    for stage, dense in enumerate((False, True)):
        turn(sync, dense=dense)
        train(model, optimizer, range(10 * stage, 10 * stage + 5))
    with mock.patch.object(auto.AutoSync, "take", side_effect=AssertionError("DDP has our hook")):
        train(model, optimizer, range(20, 22))
    assert sync.stats().steps == 12
    own = torch.autograd.grad(loss_of(model.module, rank, 99), list(model.module.parameters()))
    mean = torch.cat([each.flatten() for each in own])
    torch.distributed.all_reduce(mean)
    optimizer.zero_grad()
    loss_of(model, rank, 99).backward()
    return sync.is_dense, torch.cat([each.grad.flatten() for each in model.parameters()]), mean / workers


def test_back_from_sparse_every_bucket_is_averaged() -> None:
    for is_dense, found, mean in on_processes(2, back_to_dense):
        assert is_dense
        torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-7)


def what_waits_is_sent(rank, workers):
    """Without momentum residuals are gradients: after leaving, the mean of all that was computed has been delivered."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with short_trials():
        sync = spardl.attach(model, optimizer=optimizer, **AUTO)
    turn(sync, dense=False)
    train(model, optimizer, range(3))
    assert not sync.is_dense
    residual = sum(float(kept.residual.abs().sum()) for kept in sync.session.sync.kept().values())
    turn(sync, dense=True)
    train(model, optimizer, range(3, 6))
    return residual, sync.is_dense, weights_of(model)


def test_what_residuals_hold_is_sent_before_dense_takes_over() -> None:
    outcomes = on_processes(2, what_waits_is_sent)
    assert all(residual > 0 and is_dense for residual, is_dense, _ in outcomes)
    assert all_equal(weights for *_, weights in outcomes)


def saved_and_loaded(rank, workers, dense):
    model, optimizer, sync = attached()
    turn(sync, dense=dense)
    train(model, optimizer, range(4))
    saved = sync.state_dict(), model.state_dict(), optimizer.state_dict()
    saved = torch.utils._pytree.tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, saved)
    other, stepper, again = attached()
    other.load_state_dict(saved[1])
    stepper.load_state_dict(saved[2])
    again.load_state_dict(saved[0])
    for each in (sync, again):
        each._review = None
    train(model, optimizer, range(4, 8))
    train(other, stepper, range(4, 8))
    with pytest.raises(StateError, match="no state of"):
        again.load_state_dict({})
    return weights_of(model), weights_of(other), sync.is_dense, again.is_dense


@pytest.mark.parametrize("dense", [True, False])
def test_a_state_brings_back_what_was_chosen(dense: bool) -> None:
    for first, second, was, now in on_processes(2, saved_and_loaded, dense):
        assert was == now == dense
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, second, strict=True))


def locally(rank, workers):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with short_trials():
        sync = spardl.attach(model, optimizer=optimizer, update="local", **AUTO)
    kinds = []
    for stage, dense in enumerate((True, False, True)):
        turn_locally(sync, dense)
        train(model, optimizer, range(10 * stage, 10 * stage + 4))
        kinds.append((sync.config.is_dense, round(sync._outer.rates[0], 3)))
    sync.flush()
    return weights_of(model), kinds


def turn_locally(sync, dense):
    sync._review.settled, sync._review.is_dense, sync._review._steps = None, dense, [0.0] * 10
    verdict = Verdict.SWITCH if sync.config.is_dense != dense else Verdict.STAY
    sync._review.decide = lambda _: verdict


def test_local_updates_choose_too_and_average_everything_where_that_is_quicker() -> None:
    outcomes = on_processes(2, locally)
    assert all_equal(weights for weights, _ in outcomes)
    for _, kinds in outcomes:
        assert [dense for dense, _ in kinds] == [True, False, True]
        assert kinds[0][1] == 1.0 and kinds[1][1] > 1.0  # the factor for entries that only some send


def with_a_plan(rank, workers, folder):
    sizes = {name: each.numel() for name, each in mlp().named_parameters()}
    elements, found = sum(sizes.values()), {}
    for method in ("topka", "dense"):
        settings = {"method": method, **({"density": 0.05} if method == "topka" else {})}
        path = f"{folder}/{method}-{rank}.toml"
        PlanFile(workers, elements, digest_of(sizes), "gradients", settings).write(path)
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model)
        sync = spardl.attach(model, optimizer=optimizer, plan=path, **EXACT)
        train(model, optimizer, range(3))
        found[method] = (type(sync).__name__, sync.config.method, weights_of(model))
    PlanFile(workers + 1, elements, digest_of(sizes), "gradients", {"method": "topka"}).write(path)
    with pytest.raises(ConfigError, match="plan again"):
        spardl.attach(DistributedDataParallel(mlp()), plan=path)
    with pytest.raises(ConfigError, match=r"plan=\.\.\. or config="):
        spardl.attach(DistributedDataParallel(mlp()), plan=path, config=spardl.SyncConfig())
    return found


def test_a_plan_is_taken_up_and_one_for_others_is_refused(tmp_path) -> None:
    outcomes = on_processes(2, with_a_plan, str(tmp_path))
    for found in outcomes:
        assert found["topka"][:2] == ("SparDLState", "topka") and found["dense"][:2] == ("AutoSync", "dense")
    for method in ("topka", "dense"):
        assert all_equal(found[method][2] for found in outcomes)


def refused(rank, workers):
    model = DistributedDataParallel(mlp())
    with pytest.raises(ConfigError, match="clip_norm clips before a selection"):
        spardl.attach(model, clip_norm=1.0, method="auto")
    with pytest.raises(ConfigError, match="teams"):
        spardl.attach(model, method="auto", teamz=2)


def test_what_dense_could_not_honour_is_refused() -> None:
    on_processes(1, refused)


def alone(rank, workers):
    model, optimizer, sync = attached()
    train(model, optimizer, range(2))
    with pytest.raises(StateError, match="DDP averages gradients itself"):
        _ = sync.session
    return sync.is_dense, sync.plan[0].is_dense, float(loss_of(model, 0, 0))


def test_a_single_worker_has_nothing_to_choose() -> None:
    ((is_dense, plan_is_dense, _),) = on_processes(1, alone)
    assert is_dense and plan_is_dense
