"""Local updates on real processes: any module, any optimizer, and weights that all ranks share to the bit."""

import copy
import os
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import spardl
from local_updates import LOCAL, Normed, attach, shared_weights
from processes import on_processes
from spardl.update import RULES as UPDATES
from training import all_equal, loss_of, mlp, sgd, train, weights_of

# --- as dense as can be -----------------------------------------------------------------------------------------------


def _as_ddp(rank, workers, wrap, settings):
    theirs = DistributedDataParallel(mlp())
    train(theirs, sgd(theirs), range(6))
    ours = mlp(seed=rank)  # only rank 0's weights count
    ours = DistributedDataParallel(ours) if wrap else ours
    optimizer = sgd(ours)
    sync = attach(ours, optimizer, **{"density": 1.0, **settings})
    train(ours, optimizer, range(6))
    return weights_of(theirs), weights_of(ours), shared_weights(sync, ours)


@pytest.mark.parametrize("wrap", [False, True], ids=["module", "ddp"])
@pytest.mark.parametrize("settings", [{}, {"apply": "reset"}], ids=["ahead", "reset"])
def test_at_density_one_plain_sgd_gives_what_ddp_gives(wrap, settings):
    """A mean of weights after one step each is the mean of gradients; DDP's own all-reduce is off."""
    ranks = on_processes(2, _as_ddp, wrap, settings)
    assert all_equal(ours for _, ours, _ in ranks) and all_equal(shared for _, _, shared in ranks)
    for theirs, ours, shared in ranks:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-6)
        assert torch.equal(ours, shared)


@pytest.mark.parametrize(
    "settings",
    [{"density": spardl.DensitySchedule(0.01, dense_steps=6)}, {"density": 0.01, "dense_below": 10**6}],
    ids=["while the schedule is dense", "tensors that are too small to be sparse"],
)
def test_what_is_sent_whole_is_averaged_as_it_is(settings):
    """The factor of auto makes up for entries that only some workers send; here all of them send all."""
    for theirs, ours, _ in on_processes(2, _as_ddp, False, settings):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-6)


# --- nothing is lost --------------------------------------------------------------------------------------------------


class Ramp(nn.Module):
    """Its gradient is the same wherever it stands, so that where it must end is known."""

    def __init__(self, slope):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(slope.numel()))
        self.register_buffer("slope", slope, persistent=False)

    def forward(self):
        return self.weights @ self.slope


def _slope(rank):
    return torch.randn(400, generator=torch.Generator().manual_seed(rank)) ** 3


def _walk(rank, workers, settings, steps):
    model = Ramp(torch.zeros(400))
    optimizer = SGD(model.parameters(), lr=0.5)
    sync = attach(model, optimizer, outer_rate=1.0, **settings)
    model.slope = _slope(rank)
    shared = []
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        shared.append(shared_weights(sync, model))
    model.slope = torch.zeros(400)
    sync.flush()
    return weights_of(model), torch.stack(shared)


WALKS = [
    {"density": 0.01},
    {"density": 0.01, "delay": 1},
    {"density": 0.02, "every": 3},
    {"density": 0.02, "every": 4, "delay": 2},
    {"density": 0.02, "every": 2, "delay": 2, "method": "topka", "values": "int8"},
    {"density": 0.05, "method": "exdyna", "delay": 1},
    {"density": 0.02, "apply": "reset"},
    {"density": 0.02, "apply": "reset", "every": 3, "method": "topkdsa"},
    {"density": 0.05, "apply": "reset", "method": "chunktopk", "chunk": 64, "transform": "dct"},
    {"density": 0.02, "groups": 150, "delay": 1},
    {"density": spardl.DensitySchedule(0.02, start=0.5, steps=5, dense_steps=2), "delay": 1},
]


@pytest.mark.parametrize("settings", WALKS, ids=str)
def test_after_a_flush_every_move_of_every_rank_has_counted_once(settings):
    """What is under way is not offered again, and what waits is not lost, whatever lands when."""
    ranks = on_processes(3, _walk, settings, 13)
    assert all_equal(weights for weights, _ in ranks)
    assert all_equal(shared for _, shared in ranks), "shared weights differ between ranks in some step"
    slopes = torch.stack([_slope(rank) for rank in range(3)])
    expected = -0.5 * 13 * slopes.double().mean(0)
    scale = 0.5 * 13 * slopes.abs().double().mean(0)
    scale = scale.max() if "transform" in settings else scale  # which mixes what lies near each other
    assert ((ranks[0][0].double() - expected).abs() <= 1e-5 * scale + 1e-6).all()


# --- shared weights ---------------------------------------------------------------------------------------------------


def _look(rank, workers, settings):
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    sync = attach(model, optimizer, density=0.05, **settings)
    train(model, optimizer, range(5))
    own = weights_of(model)
    shared = shared_weights(sync, model)
    kept = torch.equal(weights_of(model), own)
    train(model, optimizer, range(5, 8))
    looked = weights_of(model)

    other = mlp()
    optimizer = AdamW(other.parameters(), lr=1e-2)
    attach(other, optimizer, density=0.05, **settings)
    train(other, optimizer, range(8))
    return own, shared, kept, torch.equal(looked, weights_of(other))


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"outer": "nesterov", "outer_rate": 0.5}], ids=str)
def test_looking_at_shared_weights_changes_nothing(settings):
    ranks = on_processes(2, _look, settings)
    assert all_equal(shared for _, shared, _, _ in ranks)
    assert not torch.equal(ranks[0][0], ranks[1][0]), "ranks have no weights of their own"
    assert all(kept and same for _, _, kept, same in ranks)


def _step_inside(rank, workers):
    model = mlp()
    optimizer = sgd(model)
    sync = attach(model, optimizer)
    with sync.shared():
        try:
            train(model, optimizer, range(1))
        except spardl.StateError as error:
            return str(error)
    return ""


def test_stepping_shared_weights_is_an_error():
    assert all("sync.shared()" in text for text in on_processes(2, _step_inside))


def _inside(rank, workers):
    """As people save: the model with shared weights, and the state beside it, in one block."""
    model = mlp()
    optimizer = sgd(model)
    sync = attach(model, optimizer, density=0.05, delay=1)
    train(model, optimizer, range(3))
    outside, own = sync.state_dict(), weights_of(model)
    with sync.shared():
        with sync.shared():
            shared = weights_of(model)
        inside = sync.state_dict()
        still = torch.equal(weights_of(model), shared)
        refused = 0
        for call in (sync.flush, sync.detach, lambda: sync.load_state_dict(outside)):
            try:
                call()
            except spardl.StateError:
                refused += 1
    same = all(
        torch.equal(inside["local"][kind][name], outside["local"][kind][name])
        for kind in ("own", "shared")
        for name in outside["local"]["own"]
    )
    return same, still, refused, torch.equal(weights_of(model), own)


def test_a_state_is_the_same_inside_the_block_of_shared_weights_and_blocks_may_be_nested():
    assert on_processes(2, _inside) == [(True, True, 3, True)] * 2


def _flush(rank, workers, wrap):
    model = DistributedDataParallel(Normed()) if wrap else Normed()
    optimizer = sgd(model, momentum=0.9)
    sync = attach(model, optimizer, density=0.02, delay=1)
    train(model, optimizer, range(4))
    norm = (model.module if wrap else model).norm
    before = norm.running_mean.clone()
    sync.flush()
    return before, norm.running_mean.clone(), weights_of(model)


@pytest.mark.parametrize("wrap", [False, True], ids=["module", "ddp"])
def test_a_flush_leaves_the_same_model_everywhere_with_the_mean_of_running_statistics(wrap):
    ranks = on_processes(2, _flush, wrap)
    assert not torch.equal(ranks[0][0], ranks[1][0])
    assert all_equal(mean for _, mean, _ in ranks) and all_equal(weights for _, _, weights in ranks)
    torch.testing.assert_close(ranks[0][1], (ranks[0][0] + ranks[1][0]) / 2)


# --- other people's loops ---------------------------------------------------------------------------------------------


def _everyday(rank, workers):
    """Accumulation, clipping, a schedule, decay by groups, two optimizers: each as its author wrote it."""
    model = mlp()
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [AdamW([{"params": decays[:2], "weight_decay": 0.1}, {"params": others}], lr=1e-2)]
    optimizers.append(SGD(decays[2:], lr=0.05, momentum=0.9, nesterov=True))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=2e-2, total_steps=20)
    before = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
    sync = spardl.attach(model, optimizer=optimizers, density=0.05, **LOCAL)
    after = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
    assert before == after, "attach has changed an optimizer"
    first = last = 0.0
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(model, rank, part) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        schedule.step()
        first, last = first or loss.item(), loss.item()
    return first, last, shared_weights(sync, model), sync.stats().total.steps


def test_accumulation_clipping_schedules_groups_and_several_optimizers_need_nothing():
    ranks = on_processes(2, _everyday)
    assert all_equal(weights for _, _, weights, _ in ranks)
    assert all(last < 0.7 * first and steps == 20 for first, last, _, steps in ranks)


def _scaled(rank, workers, given):
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    sync = attach(model, optimizer, density=0.05, scaler=scaler if given else None)
    moved = []
    for step in range(6):
        before = weights_of(model)
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        if step == 2 and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(weights_of(model), before))
    return moved, shared_weights(sync, model), scaler.get_scale()


def test_a_rank_whose_scaler_skips_a_step_moves_nothing_and_keeps_nobody_waiting():
    """The others go on, and scales are each rank's own."""
    (_, first, scale), (_, second, other) = on_processes(2, _scaled, True)
    assert torch.equal(first, second) and first.isfinite().all() and scale != other


def _scaled_resume(rank, workers):
    """As nanoGPT has it: unscale, clip, step, update; some steps are skipped on one rank."""

    def parts():
        model = mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        return model, optimizer, scaler, attach(model, optimizer, density=0.05, delay=1, scaler=scaler)

    def go(model, optimizer, scaler, steps):
        for step in steps:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, rank, step) * (torch.inf if (step, rank) in ((2, 1), (5, 0)) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    model, optimizer, scaler, sync = parts()
    go(model, optimizer, scaler, range(4))
    saved = copy.deepcopy((scaler.state_dict(), sync.state_dict()))
    go(model, optimizer, scaler, range(4, 8))
    whole = torch.cat([weights_of(model), shared_weights(sync, model)])
    model, optimizer, scaler, sync = parts()
    scaler.load_state_dict(saved[0])
    sync.load_state_dict(saved[1])
    go(model, optimizer, scaler, range(4, 8))
    return torch.equal(whole, torch.cat([weights_of(model), shared_weights(sync, model)]))


def test_a_loop_with_a_scaler_resumes_exactly():
    assert all(on_processes(2, _scaled_resume))


def test_a_scaler_that_attach_does_not_know_is_an_error():
    for kind, text in on_processes(2, _scaled, False, expect="any"):
        assert kind == "raised" and "Pass scaler=" in text


def _narrow(rank, workers):
    """Steps so small that bf16 cannot hold their sum: the float32 master does."""
    model = nn.Linear(50, 20).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = SGD(model.parameters(), lr=1.0)
    sync = attach(model, optimizer, density=1.0, outer_rate=1.0)
    start = model.weight.detach().clone()
    for _ in range(8):
        optimizer.zero_grad()
        # Rank 0 moves by one rounding step of bf16, the others not at all: the mean is half a rounding step.
        loss = (model.weight * (2.0**-7 if rank == 0 else 0.0)).sum()
        loss.backward()
        optimizer.step()
    return start.float(), model.weight.detach().float(), shared_weights(sync, model)


def test_parameters_of_sixteen_bits_keep_a_float32_master():
    for start, end, _ in on_processes(2, _narrow):
        torch.testing.assert_close(end, start - 8 * 2.0**-8, rtol=0, atol=2.0**-8)


def _layouts(rank, workers):
    """channels_last and transposed memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 5)).to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    optimizer = sgd(model)
    sync = attach(model, optimizer, density=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step + rank))).square().sum().backward()
        optimizer.step()
    return shared_weights(sync, model), model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_other_memory_formats_stay_what_they_are():
    ranks = on_processes(2, _layouts)
    assert all_equal(weights for weights, _ in ranks) and all(kept for _, kept in ranks)


def _copies(rank, workers):
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    sync = attach(model, optimizer, density=0.05)
    train(model, optimizer, range(2))
    other = copy.deepcopy(model.module)
    other.load_state_dict(mlp(seed=9).state_dict())
    before = weights_of(model)
    sync.session.check()
    return torch.equal(before, weights_of(model)), weights_of(other)


def test_a_copy_of_the_model_is_a_plain_one():
    assert all(same for same, _ in on_processes(2, _copies))


def _detach(rank, workers):
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    sync = attach(model, optimizer, density=0.02, delay=1)
    train(model, optimizer, range(3))
    sync.detach()
    start = weights_of(model)
    theirs = DistributedDataParallel(mlp())
    with torch.no_grad():
        for mine, other in zip(theirs.parameters(), model.parameters(), strict=True):
            mine.copy_(other)
    train(model, optimizer, range(3, 6))
    train(theirs, sgd(theirs), range(3, 6))
    return start, weights_of(model), weights_of(theirs)


def test_after_detach_all_ranks_have_one_model_and_ddp_averages_again():
    ranks = on_processes(2, _detach)
    assert all_equal(start for start, _, _ in ranks) and all_equal(end for _, end, _ in ranks)
    for _, end, theirs in ranks:
        torch.testing.assert_close(end, theirs, rtol=1e-5, atol=3e-6)


def _reload_inside(rank, workers):
    """Through the wrapper, and past it."""
    same = []
    for inside in (False, True):
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model)
        sync = attach(model, optimizer, density=0.05)
        train(model, optimizer, range(2))
        target, source = (model.module, mlp(seed=5)) if inside else (model, nn.ModuleDict({"module": mlp(seed=5)}))
        target.load_state_dict(source.state_dict())
        same.append(torch.equal(shared_weights(sync, model), weights_of(mlp(seed=5))))
    return same


def test_it_does_not_matter_whether_ddp_or_the_module_loads_weights():
    assert all(all(same) for same in on_processes(2, _reload_inside))


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _poisoned(rank, workers):
    model = mlp()
    optimizer = sgd(model)
    sync = attach(model, optimizer, density=0.05)
    train(model, optimizer, range(2))
    before = shared_weights(sync, model)
    if rank == 1:
        with torch.no_grad():
            model[0].bias[3] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, SGDStill(optimizer), range(2, 3))
    texts = [str(each.message) for each in caught if issubclass(each.category, spardl.SparDLWarning)]
    after = shared_weights(sync, model)
    try:
        train(model, SGDStill(optimizer), range(3, 20))
    except spardl.StateError as error:
        texts.append(str(error))
    return torch.equal(before, after), texts


class SGDStill:
    """Steps without moving anything, so that one NaN stays one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.optimizer.step()


def test_weights_that_are_not_finite_are_told_on_all_ranks_and_nothing_is_sent():
    (first, told), (second, own) = on_processes(2, _poisoned)
    assert first and second
    assert "some rank's weights" in told[0] and "'0.bias'" in own[0]
    assert "10 exchanges in a row" in told[-1] and "10 exchanges in a row" in own[-1]


def _die(rank, workers, delay):
    model = mlp()
    optimizer = sgd(model)
    sync = attach(model, optimizer, density=0.05, delay=delay, timeout=20)
    train(model, optimizer, range(2))
    if rank == 1:
        os._exit(0)
    own = weights_of(model)
    try:
        for step in range(2, 6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
    except spardl.PeerError as error:
        return error.peer, torch.equal(own, weights_of(model)) or delay == 1, sync.state_dict is not None
    return None, False, False


@pytest.mark.parametrize("delay", [0, 1])
def test_a_rank_that_dies_is_named(delay):
    outcomes = on_processes(2, _die, delay, expect="any")
    assert outcomes[1] == ("died", None)
    assert outcomes[0] == ("returned", (1, True, True))


def _other_parameters(rank, workers):
    model = mlp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = SGD(list(model.parameters())[:2], lr=0.1)
        attach(model, optimizer)
    texts = [str(each.message) for each in caught if issubclass(each.category, spardl.SparDLWarning)]
    optimizer.add_param_group({"params": list(model.parameters())[2:]})
    try:
        train(model, optimizer, range(1))
    except spardl.StateError as error:
        texts.append(str(error))
    return texts


def test_parameters_that_nobody_would_exchange_are_told_of():
    """Those of an optimizer that was not given, and those that one has got since."""
    for texts in on_processes(2, _other_parameters):
        assert len(texts) == 2 and "'2.weight' and 3 more" in texts[0] and "attach again" in texts[1]


def _refuse(rank, workers):
    texts = []
    for settings in (
        {"optimizer": None},
        {"clip_norm": 1.0},
        {"merge": "exact"},
        {"update": "lokal"},
        {"delay": 2},
        {"apply": "reset", "delay": 1},
        {"every": 0},
        {"outer_rate": 0},
        {"residual_decay": 0},
        {"update": "gradients", "every": 3},
    ):
        model = mlp()
        given = {"optimizer": sgd(model), **LOCAL, **settings}
        try:
            spardl.attach(model, **given)
            texts.append("")
        except spardl.ConfigError as error:
            texts.append(str(error))
    return texts


def test_settings_that_cannot_work_are_refused_with_a_sentence():
    expected = ["optimizer=", "clip gradients as usual", "merge", "local", "delay=1", "reset", "every=", "outer_rate="]
    expected += ["residual_decay=", 'update="local"']
    for texts in on_processes(1, _refuse):
        for text, word in zip(texts, expected, strict=True):
            assert word in text and text.endswith(".")


# --- presets ----------------------------------------------------------------------------------------------------------


def _preset(rank, workers, name, settings):
    model = mlp()
    optimizer = sgd(model, lr=1e-2) if name == "demo" else AdamW(model.parameters(), lr=1e-2)
    sync = spardl.attach(model, optimizer=optimizer, update=name, timeout=30, dense_below=0, **settings)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step % 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return shared_weights(sync, model), losses[0], losses[-1], sync.stats().total.steps


@pytest.mark.parametrize("name", [name for name in UPDATES if name not in ("gradients", "local")])
def test_every_preset_trains(name):
    ranks = on_processes(2, _preset, name, {"every": 4} if name != "demo" else {})
    assert all_equal(weights for weights, _, _, _ in ranks)
    assert all(last < first and steps == (40 if name == "demo" else 10) for _, first, last, steps in ranks)


def _one_bad_gradient(rank, workers):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, density=0.1, timeout=60)
    train(model, optimizer, range(2))
    before = weights_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.zero_grad()
        loss_of(model, rank, 2).backward()
        if rank == 1:
            model[2].bias.grad[0] = torch.inf
        steps = [each["step"].item() for each in optimizer.state.values()]
        optimizer.step()
        alike = steps == [each["step"].item() for each in optimizer.state.values()]
    train(model, optimizer, range(3, 6))
    with sync.shared():
        shared = weights_of(model)
    texts = [str(each.message) for each in caught if each.category is spardl.SparDLWarning]
    return alike, texts, bool(before.isfinite().all() and weights_of(model).isfinite().all()), shared


def test_a_gradient_that_is_not_finite_costs_its_rank_one_step_and_nothing_else():
    """Its optimizer would carry it along for ever. The rank and the parameter are named, once; the others go on."""
    (moved, quiet, fine, first), (withheld, (text,), also_fine, second) = on_processes(2, _one_bad_gradient)
    assert not moved and withheld and not quiet and fine and also_fine
    assert text.startswith("In this step the gradient of '2.bias' on rank 1 was not finite. This rank leaves it out")
    assert torch.equal(first, second)
