"""Options of a training: what, how, where its checkpoints go. Settings bear the names of `TrainSettings`' fields."""

import argparse
from pathlib import Path
from typing import get_args

from spardl.cli.file import add_config_option
from spardl.cli.options import add_json_option, add_seed_option, number
from spardl.cli.parser import Numbers, number_of
from spardl.errors import ConfigError
from spardl.train.data import check_packages
from spardl.train.recipes import DEFAULT, Recipe, choose_recipe
from spardl.train.saving import DEFAULT_KEEP, Every, Saving
from spardl.train.settings import SETTINGS, Amp, Decay, Optimizer, Schedule


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"model, data and settings that belong together: `spardl recipes` lists them (default: {DEFAULT})",
    )
    what.add_argument("--model", metavar="NAME", help="a model, instead of the recipe's")
    what.add_argument("--dataset", metavar="NAME", help="a data set, instead of the recipe's")
    what.add_argument("--data-dir", type=Path, metavar="DIR", help="where the data set's files lie")
    add_config_option(what)
    add_json_option(what, "one record per run")
    _add_length_options(parser)
    _add_optimizer_options(parser)


def _add_length_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training", "Where an option is not given, the recipe's own value counts.")
    add = group.add_argument
    scaled = "passes over the training data; a recipe's warm-up and milestones move in proportion"
    add("--epochs", type=number_of("epochs"), metavar="N", help=scaled)
    add("--max-steps", type=number_of("steps"), metavar="N", help="stop after N steps; schedules do not move")
    add("--batch-size", type=number_of("examples"), metavar="N", help="examples per worker and micro-batch")
    add("--accumulate", type=number_of("micro-batches"), metavar="N", help="micro-batches per step, synchronised once")
    add("--subset", type=number_of("examples"), metavar="N", help="train on N examples only, evenly spread")
    add("--window", type=number_of("tokens"), metavar="N", help="tokens that a model of text sees at once")
    every = "epochs from test to test; 0 tests the last one only, which is always tested"
    add("--eval-every", type=number_of("epochs", at_least=0), metavar="N", help=every)
    between = "steps from test to test, beside those of epochs, for curves over steps; 0 is none"
    add("--eval-steps", type=number_of("steps", at_least=0), metavar="N", help=between)
    add("--eval-batch", type=number_of("examples"), metavar="N", help="examples per worker and batch of a test")
    add("--loaders", type=number_of("processes", at_least=0), metavar="N", help="processes that load data, per worker")
    add("--amp", metavar="|".join(get_args(Amp)), help="mixed precision: forward and loss in bfloat16")
    add_seed_option(group, "of weights, shuffling and all else that is random")


def _add_optimizer_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer", "Likewise.")
    add = group.add_argument
    add("--optimizer", metavar="|".join(get_args(Optimizer)), help="adamw decays weights apart from the gradient")
    add("--lr", type=number, metavar="RATE", help="the highest learning rate")
    reference = "the rate is for N examples per step over all workers; scale it to what there is"
    add("--reference-batch", type=number_of("examples"), metavar="N", help=reference)
    add("--momentum", type=number, metavar="SHARE", help="of SGD; sparse methods apply it before the selection")
    add("--nesterov", action=argparse.BooleanOptionalAction, help="of SGD")
    add("--betas", type=Numbers("0.9,0.999"), metavar="B1,B2", help="of Adam")
    add("--epsilon", type=number, metavar="NUMBER", help="of Adam")
    add("--weight-decay", type=number, metavar="RATE", help="of any optimizer")
    which = "which parameters decay; matrices: neither biases nor norms, as adamw does by itself"
    add("--decay", metavar="|".join(get_args(Decay)), help=which)
    clip = "clip the averaged gradient; sparse methods each worker's own before selecting, to sqrt(workers) times it;"
    clip += " with local updates each worker's own"
    add("--clip", type=number, metavar="NORM", help=clip)
    add("--schedule", metavar="|".join(get_args(Schedule)), help="of the learning rate, after the warm-up")
    floor = "the share of the rate that cosine and linear end with"
    add("--floor", type=number, metavar="SHARE", help=floor)
    fallen = "the step at which they get there, whatever the epochs say; goes well with --max-steps"
    add("--floor-step", type=number_of("steps"), metavar="N", help=fallen)
    add("--warmup", type=number, metavar="EPOCHS", help="in which the rate rises from a share of it, linearly")
    instead = "the same in steps, instead of epochs"
    add("--warmup-steps", type=number_of("steps", at_least=0), metavar="N", help=instead)
    start = "that share (default: one over the number of workers)"
    add("--warmup-start", type=number, metavar="SHARE", help=start)
    milestones = "epochs at which the rate falls; with --epochs alone, a recipe's move in proportion"
    add("--milestones", type=Numbers("81,122"), metavar="E,E,...", help=milestones)
    add("--gamma", type=number, metavar="FACTOR", help="what a milestone multiplies the rate by")


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "checkpoints", "With a folder for them, Ctrl-C and SIGTERM save before the run ends."
    )
    add = group.add_argument
    add("--checkpoint-dir", type=Path, metavar="DIR", help="save here, one folder per checkpoint; all ranks share it")
    add(
        "--save-every", type=_every, metavar="N|TIME", help="steps, or a time such as 5m (default: 10m), and at the end"
    )
    keep = f"how many of the last ones stay (default: {DEFAULT_KEEP})"
    add("--keep", type=number_of("checkpoints"), metavar="K", help=keep)
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="latest|auto|PATH",
        help="go on exactly where a run was saved: the last checkpoint, the same if there is any, or one by its path",
    )


def chosen_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe that the options name, with what they change; raises `ConfigError` where they cannot work."""
    given = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    recipe = choose_recipe(options.recipe, options.model, options.dataset, given)
    check_packages(recipe.data)
    return recipe


def chosen_saving(options: argparse.Namespace) -> Saving:
    """Where checkpoints go and come from, by the options; raises `ConfigError` where that cannot work."""
    if options.checkpoint_dir is None and (options.save_every is not None or options.keep is not None):
        option = "--save-every" if options.save_every is not None else "--keep"
        raise ConfigError(f"{option} has nothing to save to; add --checkpoint-dir.")
    saving = Saving(
        folder=options.checkpoint_dir,
        every=options.save_every or Every(),
        keep=options.keep if options.keep is not None else DEFAULT_KEEP,
        resume=options.resume,
    )
    saving.check()
    return saving


def _every(text: str) -> Every:
    try:
        return Every.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error
