"""FSDP2: parts of a model that are synchronised between replicas, against what torch does on a 2-D mesh."""

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW

import spardl
from processes import on_processes
from sharding import HOOKED, WORKERS, grid, needs_fsdp2, parts, sharded, whole
from spardl.integrations.parts import part_of
from training import EXACT, all_equal, loss_of, mlp, sgd, train

pytestmark = needs_fsdp2

WAYS = {
    "local": {"update": "local"},
    "local, reset": {"update": "local", "apply": "reset"},
    "gradients": {},
    **({"gradients in backward": {"when": "backward"}} if HOOKED else {}),
}


def attach(model, optimizer, mesh, **settings):
    with warnings.catch_warnings():  # of momentum behind the selection, which is not what is looked at here
        warnings.simplefilter("ignore", spardl.SparDLWarning)
        return spardl.attach(model, optimizer=optimizer, replicate=mesh["replicate"], **{**EXACT, **settings})


def started(mesh, make=sgd, **settings):
    model = sharded(mesh["shard"])
    if mesh["replicate"].get_local_rank():
        nn.init.zeros_(model[0].weight)  # only the first replica's weights count
    optimizer = make(model)
    return model, optimizer, attach(model, optimizer, mesh, **settings)


def adamw(model):
    return AdamW(model.parameters(), lr=1e-2)


def heavy(model):
    return sgd(model, momentum=0.9, weight_decay=0.01)


# --- as dense as can be -----------------------------------------------------------------------------------------------


def _as_hsdp(rank, workers, ways):
    mesh = grid()
    theirs = sharded(mesh)
    train(theirs, heavy(theirs), range(5))
    found = {}
    for name, settings in ways.items():
        ours, optimizer, _ = started(mesh, heavy, density=1.0, **settings)
        train(ours, optimizer, range(5))
        found[name] = whole(ours)
    return whole(theirs), found


def test_at_density_one_every_way_gives_the_weights_of_native_hsdp():
    """With momentum and weight decay, wherever these act; and all ranks have the same bits."""
    ranks = on_processes(WORKERS, _as_hsdp, WAYS)
    for name in WAYS:
        assert all_equal(found[name] for _, found in ranks), name
        for theirs, found in ranks:
            torch.testing.assert_close(found[name], theirs, rtol=1e-5, atol=3e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


# --- nothing is lost --------------------------------------------------------------------------------------------------


def _lose(rank, workers):
    mesh, lost = grid(), {}
    for when in ("step", "backward") if HOOKED else ("step",):
        theirs, ours = sharded(mesh), sharded(mesh["shard"])
        still = sgd(ours, lr=0.0)
        sync = attach(ours, still, mesh, density=0.05, when=when)
        dense, sparse = 0, 0
        for step in range(6):
            for model in (theirs, ours):
                model.zero_grad()
                loss_of(model, rank, step).backward()
            still.step()
            dense += torch.cat([each.grad.full_tensor().double().flatten() for each in theirs.parameters()])
            sparse += torch.cat([each.grad.full_tensor().double().flatten() for each in ours.parameters()])
        sync.detach()  # what waits is sent by the next step
        ours.zero_grad()
        (loss_of(ours, rank, 0) * 0).backward()
        still.step()
        sparse += torch.cat([each.grad.full_tensor().double().flatten() for each in ours.parameters()])
        lost[when] = float((dense - sparse).abs().max() / dense.abs().max())
    model, optimizer, sync = started(mesh, adamw, update="local", density=0.05, outer_rate=1.0)
    train(model, optimizer, range(6))
    with sync.shared():
        shared = parts(model)
    own = parts(model)
    sync.flush()
    between = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(between, own, group=mesh["replicate"].get_group())
    lost["local"] = float((parts(model) - torch.stack(between).mean(0)).abs().max())
    return lost, mesh["shard"].get_local_rank(), shared, parts(model)


def test_what_replicas_put_in_comes_out_and_parts_are_the_same_bits_on_all_of_them():
    ranks = on_processes(WORKERS, _lose)
    for lost, *_ in ranks:
        assert all(each < 1e-5 for each in lost.values()), lost
    for position in range(2):
        assert all_equal(shared for _, at, shared, _ in ranks if at == position)
        assert all_equal(flushed for _, at, _, flushed in ranks if at == position)


# --- a part that is not finite ----------------------------------------------------------------------------------------


def _shared_parts(model, sync):
    with sync.shared():
        return parts(model)


def _warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if issubclass(each.category, spardl.SparDLWarning)]


def _break(rank, workers, settings):
    """In one step one element of rank 1's part is not a number; its fellow's part is fine."""
    model, optimizer, sync = started(grid(), density=0.1, **settings)
    train(model, optimizer, range(2))
    before = _shared_parts(model, sync)
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    if rank == 1:
        part_of(model[0].weight.grad).view(-1)[3] = torch.nan
    texts = _warned(optimizer.step)
    same = torch.equal(before, _shared_parts(model, sync))
    if rank == 1 and "update" in settings:
        part_of(model[0].weight).view(-1)[3] = 0.0  # its own weights are its own affair
    train(model, optimizer, range(3, 5))
    return same, texts, sync.stats().skipped, parts(model).isfinite().all(), before.equal(_shared_parts(model, sync))


@pytest.mark.parametrize("settings", [{"update": "local"}, {}], ids=["local", "gradients"])
def test_a_value_that_is_not_finite_in_one_part_is_refused_by_all_parts_of_all_replicas(settings):
    """No part of the model moves in that step, and all of them go on."""
    for rank, (same, texts, skipped, finite, stuck) in enumerate(on_processes(WORKERS, _break, settings)):
        assert same, f"rank {rank} has moved"
        assert skipped == 1 and finite and not stuck
        assert len(texts) == 1 and ("this rank's" if rank == 1 else "some rank's") in texts[0], texts


def _break_in_backward(rank, workers):
    model, _, sync = started(grid(), when="backward", density=0.1)
    usual = sync._hook("0")

    def broken(gradients):
        if rank == 1:
            gradients[3] = torch.nan
        usual(gradients)

    model[0].set_all_reduce_hook(broken)
    texts = _warned(lambda: loss_of(model, rank, 0).backward())
    return [float(part_of(each.grad).abs().sum()) for each in model.parameters()], texts


@pytest.mark.skipif(not HOOKED, reason="this torch has no hook inside backward")
def test_in_backward_a_module_that_is_not_finite_in_one_part_is_left_out_by_all():
    """The other modules count by themselves."""
    for rank, (sums, texts) in enumerate(on_processes(WORKERS, _break_in_backward)):
        assert sums[:2] == [0.0, 0.0] and sum(sums[2:]) > 0
        assert len(texts) == 1 and ("this rank's gradients of '0'" if rank == 1 else "some rank's") in texts[0]


# --- what observers see in backward -----------------------------------------------------------------------------------


def _observe(rank, workers):
    """Three steps, of which in the second one module of rank 1 is not finite; then one without the first layer."""
    model, optimizer, sync = started(grid(), when="backward", density=spardl.DensitySchedule(0.1, 0.5, 2))
    events, board = [], sync.dashboard()
    sync.observe(events.append)
    usual, broken = sync._hook("0"), []

    def sometimes(gradients):
        if rank == 1 and broken:
            gradients[3] = torch.nan
        usual(gradients)

    model[0].set_all_reduce_hook(sometimes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", spardl.SparDLWarning)
        for step in range(3):
            broken[:] = [True] if step == 1 else []
            train(model, optimizer, [step])
    inner = torch.randn(4, model[2].in_features).requires_grad_()
    model[2](inner).sum().backward()
    seen = board.history.snapshot()
    board.close()
    state = sync.state_dict()
    return events, sync.stats().total.bytes_sent, list(sync._sizes), seen["steps"], state["passes"]


@pytest.mark.skipif(not HOOKED, reason="this torch has no hook inside backward")
def test_in_backward_observers_are_told_of_a_step_per_pass():
    """Of all modules together, also if backward leaves one out; the dashboard counts the same steps."""
    for events, sent, modules, shown, passes in on_processes(WORKERS, _observe):
        assert [event.step for event in events] == [0, 1, 2, 3] and shown == passes == 4
        assert [event.counted for event in events] == [True, False, True, True]
        assert [event.groups for event in events] == [len(modules)] * 3 + [1]
        assert sum(event.bytes_sent for event in events) == sent
        assert [span.group for span in events[0].spans] == modules[::-1]
        assert events[0].density > events[2].density > 0


# --- a rank that dies -------------------------------------------------------------------------------------------------


def _die(rank, workers, settings):
    model, optimizer, _ = started(grid(), density=0.1, **settings)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    if rank == 3:
        os._exit(0)
    try:
        optimizer.step()
    except spardl.PeerError as error:
        return f"{error} {' '.join(getattr(error, '__notes__', ()))}"
    return "went on"


@pytest.mark.parametrize("settings", [{"update": "local"}], ids=["local"])
def test_when_a_rank_dies_all_parts_of_all_replicas_stop(settings):
    """Ranks 1 and 3 hold one part, 0 and 2 the other: 1 loses its peer, 2 its fellow, and 0 hears of it from 1."""
    *others, dead = on_processes(WORKERS, _die, settings, expect="any")
    assert dead[0] == "died"
    for rank, (kind, text) in enumerate(others):
        assert (kind == "returned" and text.startswith("rank ")) or "gone" in text, (rank, kind, text)


# --- weights that FSDP has gathered before ----------------------------------------------------------------------------


def _evaluate(rank, workers):
    """The root stays gathered after a forward without backward."""
    mesh = grid()
    model = sharded(mesh["shard"], nn.Sequential(nn.Linear(20, 5)))
    fresh = nn.Sequential(nn.Linear(20, 5))
    optimizer = adamw(model)
    sync = attach(model, optimizer, mesh, update="local", density=0.05)
    inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))

    def output(of):
        with torch.no_grad():
            return of(inputs)

    def expected():
        vector = whole(model)
        fresh[0].weight.data, fresh[0].bias.data = vector[:100].view(5, 20), vector[100:]
        return output(fresh)

    same = []
    for step in range(3):
        train(model, optimizer, [step])
        same.append(torch.allclose(output(model), expected()))
        with sync.shared():
            same.append(torch.allclose(output(model), expected()))
        same.append(torch.allclose(output(model), expected()))
    sync.flush()
    return [*same, torch.allclose(output(model), expected())]


def test_inside_and_after_a_block_of_shared_weights_the_model_computes_with_what_it_shows():
    for same in on_processes(WORKERS, _evaluate):
        assert all(same), same


# --- what scripts do --------------------------------------------------------------------------------------------------


def _everyday(rank, workers):
    """Micro-batches and a clipped norm, on torch's mesh of two dimensions and on ours."""
    mesh, found = grid(), {}
    for name, settings in {"native": None, **WAYS}.items():
        model = sharded(mesh if settings is None else mesh["shard"])
        optimizer = sgd(model)
        if settings is not None:
            attach(model, optimizer, mesh, density=1.0, **settings)
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                (loss_of(model, rank % 2, 10 * step + micro) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found[name] = whole(model)
    return found


def test_accumulation_and_clipping_are_what_they_are_without_us():
    """Replicas have the same data here, since each clips its own gradient."""
    for found in on_processes(WORKERS, _everyday):
        for name in WAYS:
            torch.testing.assert_close(found[name], found["native"], rtol=1e-5, atol=3e-6)


def _scaled(rank, workers):
    """In step 1 rank 1's loss is infinite, and with it the gradients of its whole replica."""
    mesh, found = grid(), {}
    for name in ("local", "gradients", "gradients in backward"):
        model = sharded(mesh["shard"])
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        attach(model, optimizer, mesh, scaler=scaler, density=0.1, **WAYS[name])
        moved = []
        for step in range(3):
            before = parts(model)
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step) * (torch.inf if (rank, step) == (1, 1) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, parts(model)))
        found[name] = moved, scaler.get_scale(), bool(parts(model).isfinite().all())
    return found


def test_a_scaler_skips_gradients_everywhere_and_local_updates_in_one_replica():
    for rank, found in enumerate(on_processes(WORKERS, _scaled)):
        assert found["gradients"] == found["gradients in backward"] == ([True, False, True], 2.0**9, True)
        assert found["local"][1:] == (2.0**9 if rank < 2 else 2.0**10, True)


def _tiny(rank, workers):
    """One row, so that the second part is empty."""
    mesh, found = grid(), []
    for settings in WAYS.values():
        model = sharded(mesh["shard"], nn.Sequential(nn.Linear(20, 1, bias=False)))
        nn.init.zeros_(model[0].weight)
        optimizer = sgd(model)
        sync = attach(model, optimizer, mesh, density=1.0, **settings)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 20), float(rank))).sum().backward()
            optimizer.step()
        sync.load_state_dict(sync.state_dict())
        found.append(whole(model))
        sync.detach()
    return found


def test_a_rank_whose_part_is_empty_takes_part_in_every_step():
    for found in on_processes(WORKERS, _tiny):
        for weights in found:
            torch.testing.assert_close(weights, torch.full((20,), -0.1 * 3 * 1.5))


def _late(rank, workers):
    mesh = grid()
    model, optimizer, sync = started(mesh, adamw, update="local", density="auto", delay=1, density_limits=(0.01, 0.2))
    densities = []
    train(model, optimizer, range(12), each=lambda: densities.append(sync.state_dict()["local"]["density"]))
    return densities


def test_an_adaptive_density_is_the_same_in_all_parts():
    assert len({tuple(densities) for densities in on_processes(WORKERS, _late)}) == 1


# --- resuming ---------------------------------------------------------------------------------------------------------


def _resume(rank, workers, cases):
    mesh, found = grid(), []
    for make, gathered, settings in cases:
        model, optimizer, sync = started(mesh, make, **{"density": 0.05, **settings})
        train(model, optimizer, range(4))
        state = sync.gathered_state_dict() if gathered else sync.state_dict()
        saved = copy.deepcopy([state, model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, range(4, 8))
        uninterrupted = parts(model)
        model, optimizer, sync = started(mesh, make, **{"density": 0.05, **settings})
        train(model, optimizer, range(20, 22))
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        sync.load_state_dict(saved[0])
        train(model, optimizer, range(4, 8))
        found.append((uninterrupted, parts(model)))
    return found


def test_resuming_equals_not_having_stopped_bit_for_bit():
    """Weights, from one state per rank or from one for all ranks with the same part."""
    cases = [(adamw, True, {"update": "local", "delay": 1}), (heavy, False, {})]
    if HOOKED:
        falling = spardl.DensitySchedule(0.05, 0.5, 6)
        cases.append((sgd, False, {"when": "backward", "method": "exdyna", "density": falling}))
    for found in on_processes(WORKERS, _resume, cases):
        for (uninterrupted, resumed), case in zip(found, cases, strict=True):
            assert torch.equal(uninterrupted, resumed), case


# --- what cannot work -------------------------------------------------------------------------------------------------


def _refused(rank, workers):
    mesh = grid()
    model, native = sharded(mesh["shard"]), sharded(mesh)
    optimizer, texts = sgd(model), []
    replicate = {"replicate": mesh["replicate"]}
    plain = mlp()
    for which, given in [
        (native, {"optimizer": sgd(native), **replicate}),
        (native, {"optimizer": sgd(native), "update": "local", **replicate}),
        (native, {"when": "backward", **replicate}),
        (model, {"optimizer": optimizer}),
        (model, {"optimizer": optimizer, "update": "local"}),
        (model, {"optimizer": optimizer, "replicate": mesh["shard"]}),
        (model, {"optimizer": optimizer, "process_group": mesh["replicate"], **replicate}),
        (model, {**replicate}),
        (model, {"optimizer": optimizer, "clip_norm": 1.0, **replicate}),
        (model, {"optimizer": optimizer, "merge": "omgs", **replicate}),
        (model, {"optimizer": optimizer, "when": "never", **replicate}),
        (model, {"optimizer": optimizer, "when": "backward", "update": "local", **replicate}),
        (plain, {"optimizer": sgd(plain), "when": "backward", **replicate}),
    ]:
        try:
            spardl.attach(which, timeout=30, density=0.1, **given)
            texts.append("attached")
        except spardl.ConfigError as error:
            texts.append(str(error))
    return texts


def _refused_by_an_old_torch(rank, workers):
    if HOOKED:
        del FSDPModule.set_all_reduce_hook
    try:
        started(grid(), when="backward")
    except spardl.ConfigError as error:
        return str(error)
    return "attached"


def test_a_torch_without_a_hook_in_backward_is_told_of():
    assert all("no FSDPModule.set_all_reduce_hook" in text for text in on_processes(WORKERS, _refused_by_an_old_torch))


def test_what_cannot_work_is_refused_with_a_sentence():
    for texts in on_processes(WORKERS, _refused):
        hsdp, missing = 'fully_shard with mesh["shard"] alone', 'replicate=mesh["replicate"]'
        wanted = [
            hsdp,
            hsdp,
            hsdp,
            missing,
            missing,
            "cannot be other replicas",
            "give one",
            "0 optimizers",
        ]
        wanted += ["clip gradients as usual", "merge is for DDP", "never", "about gradients", "wrap it first"]
        for text, part in zip(texts, wanted, strict=True):
            assert part in text and text.endswith("."), (part, text)
