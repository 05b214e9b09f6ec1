"""The models that recipes train: their sizes, their shapes, and what each expects of its data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from spardl.errors import ConfigError
from spardl.train.models import MODELS, build_model
from spardl.train.optimizer import build_optimizer
from spardl.train.settings import TrainSettings
from spardl.train.tasks import Classification, LanguageModel, Ranking, Task
from training import all_equal, lost_in_a_step, weights_of

CIFAR10 = {"classes": 10, "channels": 3}
CIFAR100 = {"classes": 100, "channels": 3}
IMAGENET = {"classes": 1000, "channels": 3}
MNIST = {"classes": 10, "channels": 1}
IMDB = {"vocabulary": 50_001, "classes": 2}
PTB = {"vocabulary": 10_000}
SHAKESPEARE = {"vocabulary": 65}
WORDPIECE = {"vocabulary": 30_522}
MOVIELENS_20M = {"users": 138_493, "items": 26_744}

COUNTS: list[tuple[str, dict[str, int], int]] = [
    ("digits-cnn", MNIST, 151_306),
    ("mnist-cnn", MNIST, 431_080),
    ("resnet20", CIFAR10, 269_722),
    ("resnet56", CIFAR10, 853_018),
    ("resnet110", CIFAR10, 1_727_962),
    ("resnet18", IMAGENET, 11_689_512),
    ("resnet50", IMAGENET, 25_557_032),
    ("resnet152", IMAGENET, 60_192_808),
    ("resnet18-cifar", CIFAR10, 11_173_962),
    ("resnet18-cifar", CIFAR100, 11_220_132),
    ("resnet152-cifar", CIFAR10, 58_156_618),
    ("vgg16", CIFAR10, 14_728_266),
    ("vgg19", CIFAR100, 20_086_692),
    ("alexnet", CIFAR10, 23_468_874),
    ("googlenet", CIFAR10, 6_166_250),
    ("googlenet", CIFAR100, 6_258_500),
    ("inception-v4", IMAGENET, 42_679_816),
    ("inception-v4-cifar", CIFAR100, 41_296_516),
    ("senet18", CIFAR10, 11_260_354),
    ("senet18", CIFAR100, 11_306_524),
    ("lstm-imdb", IMDB, 2_561_052),
    ("lstm-ptb", PTB, 66_034_000),
    ("lstm-wikitext2", {"vocabulary": 33_278}, 31_819_578),
    ("lstm-wikitext2", {"vocabulary": 28_869}, 28_949_319),
    ("lstm-small", PTB, 2_653_200),
    ("neumf", MOVIELENS_20M, 31_832_577),
    ("neumf-small", {"users": 943, "items": 1682}, 40 * (943 + 1682) + 2_761),
    ("bert-base", WORDPIECE, 109_514_298),
    ("bert-large", WORDPIECE, 335_174_458),
    ("bert-small", WORDPIECE, 11_201_594),
    ("bert-tiny", WORDPIECE, 4_416_698),
    ("gpt-small", {"vocabulary": 50_257}, 124_439_808),
    ("gpt-mini", PTB, 2_106_112),
    ("gpt-nano", SHAKESPEARE, 809_856),
    ("gpt-10m", SHAKESPEARE, 10_770_816),
]

IMAGE_SIDES = {
    "digits-cnn": 8,
    "mnist-cnn": 28,
    "vgg16": 32,
    "vgg19": 32,
    "alexnet": 32,
    "resnet18": 64,
    "resnet50": 64,
    "resnet152": 64,
    "inception-v4": 96,
    "inception-v4-cifar": 16,
}
OTHERS = 16  # the side of images for models that take any
VOCABULARY = 60
LANGUAGE_MODELS = [name for name in MODELS if name.startswith(("lstm", "bert", "gpt")) and name != "lstm-imdb"]
RECURRENT = [name for name in LANGUAGE_MODELS if name.startswith("lstm")]


@pytest.fixture(autouse=True)
def same_weights_every_time() -> None:
    torch.manual_seed(0)


def inputs_of(name: str) -> tuple[dict[str, int], tuple[Tensor, ...], tuple[int, ...]]:
    """Facts, a small batch, and the shape of the scores for it."""
    if name.startswith("neumf"):
        return {"users": 30, "items": 40}, (torch.arange(6), torch.arange(6) * 5), (6,)
    if name == "lstm-imdb":
        tokens = torch.randint(VOCABULARY, (3, 7))
        return {"vocabulary": VOCABULARY, "classes": 2}, (tokens, torch.tensor([4, 7, 1])), (3, 2)
    if name in LANGUAGE_MODELS:
        return {"vocabulary": VOCABULARY}, (torch.randint(VOCABULARY, (2, 5)),), (2, 5, VOCABULARY)
    channels = 1 if name in ("digits-cnn", "mnist-cnn") else 3
    side = IMAGE_SIDES.get(name, OTHERS)
    return {"classes": 10, "channels": channels}, (torch.randn(2, channels, side, side),), (2, 10)


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "facts", "count"), COUNTS, ids=[f"{name}-{count}" for name, _, count in COUNTS])
def test_a_model_has_the_published_number_of_parameters(name: str, facts: dict[str, int], count: int) -> None:
    """Results are compared at equal size, so the size is exact."""
    with torch.device("meta"):
        assert parameters_of(build_model(name, facts)) == count


def test_the_size_of_every_model_is_known() -> None:
    """A new model goes into the table above as well."""
    assert {name for name, _, _ in COUNTS} == set(MODELS)


# Deep, and made of the same blocks as others.
SLOW = ("resnet152", "resnet152-cifar", "inception-v4", "googlenet", "vgg19", "bert-base", "gpt-small")


# bert-large is bert-base with other numbers, and takes 3 GB.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS if name != "bert-large"],
)
def test_every_parameter_of_a_model_gets_a_gradient(name: str) -> None:
    """A batch of its kind gives scores of the right shape, and a finite gradient for each parameter."""
    facts, inputs, shape = inputs_of(name)
    model = build_model(name, facts)
    scores = model(*inputs)
    if name in RECURRENT:
        scores, _ = scores
    assert scores.shape == shape
    scores.square().mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{key} is not used"
        assert bool(parameter.grad.isfinite().all()), f"the gradient of {key} is not finite"


# What small models show in seconds.
QUICK = ("digits-cnn", "mnist-cnn", "resnet20", "lstm-imdb", "lstm-small", "neumf-small", "bert-tiny", "gpt-mini")
DENSITY = 0.01


def labelled(name: str, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> tuple[Task, tuple[Tensor, ...]]:
    """The task that recipes give this model, and a batch for it."""
    if name.startswith("neumf"):
        return Ranking(), (*inputs, torch.randint(2, shape))
    task = LanguageModel(recurrent=name in RECURRENT) if name in LANGUAGE_MODELS else Classification()
    return task, (*inputs, torch.randint(shape[-1], shape[:-1]))


def one_step(rank: int, workers: int, name: str) -> dict[str, Any]:
    """As `Run` does it: statistics each rank's own, momentum handed over, the task's own loss."""
    torch.manual_seed(0)
    facts, _, _ = inputs_of(name)
    model = DistributedDataParallel(build_model(name, facts), broadcast_buffers=False)
    optimizer = build_optimizer(model, TrainSettings(epochs=1, batch_size=1, lr=0.1, momentum=0.9))
    sync = spardl.attach(model, optimizer=optimizer, density=DENSITY, timeout=60)
    torch.manual_seed(1 + rank)
    _, inputs, shape = inputs_of(name)
    task, batch = labelled(name, inputs, shape)
    before = weights_of(model)
    losses = []

    def loss(each: nn.Module) -> Tensor:
        torch.manual_seed(3 + rank)  # the same dropout, whenever it is asked
        value, _ = task.loss(each, batch, None)
        losses.append(value.item())
        return value

    lost = lost_in_a_step(model, sync, loss)  # the first velocity is the gradient, so this may be asked here
    optimizer.step()
    after = weights_of(model)
    residual = sum(float(each.abs().sum()) for each in sync.state_dict()["residuals"].values())
    stats = sync.stats().total
    return {
        "lost": lost,
        "loss": losses[-1],
        "weights": after,
        "moved": float((after != before).double().mean()),
        "kept": residual,
        "dense": stats.dense,
    }


# bert-large is left out here too.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS if name != "bert-large"],
)
def test_a_model_takes_a_step_with_two_workers(name: str) -> None:
    """Both workers end with the same weights, few of which moved; what was not sent is kept, and nothing is lost."""
    ranks = on_processes(2, one_step, name, timeout=300)
    assert all_equal(found["weights"] for found in ranks), "the workers' weights differ"
    assert ranks[0]["loss"] != ranks[1]["loss"], "the workers saw the same batch"
    for found in ranks:
        assert not found["dense"]
        assert found["lost"] < 1e-5
        assert 0 < found["moved"] <= 1.01 * DENSITY
        assert found["kept"] > 0
        assert bool(found["weights"].isfinite().all())


@pytest.mark.parametrize(
    "name", ["resnet20", "alexnet", "senet18", "googlenet", "lstm-small", "neumf-small", "bert-tiny", "gpt-mini"]
)
def test_a_model_begins_undecided(name: str) -> None:
    """Fresh scores are of moderate size: the first loss is near that of a guess, not far above."""
    facts, inputs, _ = inputs_of(name)
    scores = build_model(name, facts)(*inputs)
    if name in RECURRENT:
        scores, _ = scores
    assert float(scores.detach().abs().mean()) < 2


@pytest.mark.parametrize("name", ["gpt-mini", "lstm-small"])
def test_a_language_model_does_not_look_ahead(name: str) -> None:
    """A later token changes no earlier score."""
    model = build_model(name, {"vocabulary": VOCABULARY}).eval()
    tokens = torch.randint(VOCABULARY, (2, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCABULARY
    before, after = (model(each)[0] if name in RECURRENT else model(each) for each in (tokens, changed))
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4], after[:, 4])


def test_bert_looks_both_ways() -> None:
    """A later token changes earlier scores too."""
    model = build_model("bert-tiny", {"vocabulary": VOCABULARY}).eval()
    tokens = torch.randint(VOCABULARY, (1, 6))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCABULARY
    assert not torch.allclose(model(tokens)[:, 0], model(changed)[:, 0])


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_model_goes_on_where_it_stopped(name: str) -> None:
    """Two windows with the state carried over give the scores of one long window."""
    model = build_model(name, {"vocabulary": VOCABULARY}).eval()
    tokens = torch.randint(VOCABULARY, (2, 6))
    with torch.no_grad():
        whole, _ = model(tokens)
        first, state = model(tokens[:, :3])
        second, (hidden, cell) = model(tokens[:, 3:], state)
    assert hidden.shape == cell.shape == (model.lstm.num_layers, 2, model.lstm.hidden_size)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


def test_what_pads_a_review_does_not_matter() -> None:
    """Scores come from the state at the last real token, whatever follows and whoever shares the batch."""
    model = build_model("lstm-imdb", {"vocabulary": VOCABULARY, "classes": 2})
    tokens, lengths = torch.randint(VOCABULARY, (3, 9)), torch.tensor([4, 9, 1])
    scores = model(tokens, lengths)
    for text, length, score in zip(tokens, lengths, scores, strict=True):
        torch.testing.assert_close(model(text[None, :length], length[None])[0], score)


def test_neumf_scores_a_table_of_candidates() -> None:
    """Users and items of any common shape give a logit each."""
    model = build_model("neumf-small", {"users": 30, "items": 40})
    users, items = torch.arange(5)[:, None].expand(5, 8), torch.arange(40).view(5, 8)
    table = model(users, items)
    assert table.shape == (5, 8)
    torch.testing.assert_close(table[3], model(users[3], items[3]))


def test_a_model_for_another_kind_of_data_says_what_it_lacks() -> None:
    """The first fact that the data set does not have is named, and so is the data set."""
    with pytest.raises(ConfigError) as error:
        build_model("lstm-imdb", {"classes": 10, "channels": 3}, "cifar10")
    assert str(error.value) == (
        "model lstm-imdb needs to know the vocabulary of its data, which cifar10 does not have;"
        " choose a model for this kind of data."
    )


@pytest.mark.parametrize("name", ["bert-tiny", "gpt-mini", "gpt-nano"])
def test_a_window_longer_than_the_table_of_positions_is_refused(name: str) -> None:
    """The sentence gives both lengths."""
    model = build_model(name, {"vocabulary": VOCABULARY, "positions": 8})
    with pytest.raises(ConfigError, match="a window of 9 tokens exceeds this model's 8 positions"):
        model(torch.zeros(1, 9, dtype=torch.long))
