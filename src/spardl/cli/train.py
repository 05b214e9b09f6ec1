"""`spardl train`."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spardl.cli.board import Board, add_dashboard_options, board_for, check_dashboard
from spardl.cli.log import Log, check_log_dir
from spardl.cli.options import add_model_options, add_sync_options, add_worker_options, training_config
from spardl.cli.output import as_bytes, as_figure, as_percent, as_seconds, check_target, records, table
from spardl.cli.parser import number_of
from spardl.cli.plot import check_plot, draw_run
from spardl.cli.progress import observer
from spardl.cli.ranks import run_on_ranks
from spardl.cli.training import add_checkpoint_options, add_recipe_options, chosen_recipe, chosen_saving
from spardl.cli.updates import add_update_options, chosen_update, given_local_settings
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError
from spardl.launch.place import Place
from spardl.launch.signals import asked_to_stop
from spardl.planning.planfile import PlanFile
from spardl.update import GRADIENTS, LocalUpdates, resolve

if TYPE_CHECKING:
    from spardl.train.report import Observer, TrainReport

SUMMARY = "train a recipe with local workers, or as one rank under torchrun"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe_options(parser)
    add_checkpoint_options(parser)
    add_log_options(parser)
    add_worker_options(parser)
    add_sync_options(parser)
    add_model_options(parser)
    add_update_options(parser)
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="settings that `spardl plan --out` chose; those given here count more"
    )


def add_log_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it leaves behind")
    group.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="write JSON lines (log.jsonl) and TensorBoard's event files here"
    )
    group.add_argument(
        "--log-every",
        type=number_of("steps"),
        default=10,
        metavar="N",
        help="steps from line to line, beside one per epoch (default: %(default)s)",
    )
    group.add_argument(
        "--record-gradients",
        metavar="FILE[:STEPS]",
        help="write every worker's own gradients of the first steps (default: 1), for `spardl simulate --gradients`",
    )
    add_dashboard_options(group)
    group.add_argument("--plot", metavar="FILE", help="draw loss and metric over time, as .png, .svg or .pdf")


def run(options: argparse.Namespace) -> int:
    # What cannot work is refused before any worker starts.
    plan = PlanFile.read(options.plan) if options.plan is not None else None
    asked, chooses = training_config(options)
    rule, config = with_plan(options, plan, asked) if plan else chosen_update(options, options.update, asked)
    check_auto(chooses, plan, config)
    recipe, saving = chosen_recipe(options), chosen_saving(options)
    check_log_dir(options.log_dir, resuming=saving.resume is not None)
    check_plot(options.plot)
    recording = chosen_recording(options.record_gradients)
    check_dashboard(options)

    def work(place: Place) -> None:
        from spardl.train.keeper import Keeper
        from spardl.train.loop import train
        from spardl.train.recording import GradientRecorder

        with contextlib.ExitStack() as stack:
            write = stack.enter_context(records(options.json if place.rank == 0 else None))
            board = stack.enter_context(board_for(options, place.rank))
            watcher = stack.enter_context(watching(options, place.rank, board))
            asked: Callable[[], int] = stack.enter_context(asked_to_stop()) if saving.folder is not None else lambda: 0
            keeper = Keeper(saving, asked) if saving.folder is not None or saving.resume is not None else None
            recorder = GradientRecorder(*recording) if recording is not None else None
            how: dict[str, Any] = {"rule": rule, "plan": plan, "data_dir": options.data_dir, "recorder": recorder}
            how["chooses"] = chooses
            attached = None if board is None else board.connect
            report = train(recipe, config, **how, observer=watcher, keeper=keeper, attached=attached)
            write(report.to_dict())
        if place.rank == 0:
            if options.json != "-":
                show(report)
            if options.plot is not None:
                draw_run(report, options.plot)

    # A run that can save may take its time to do so.
    patience = config.timeout if saving.folder is not None else 0.0
    return run_on_ranks(options, [config], work, patience=patience)


def chosen_recording(text: str | None) -> tuple[Path, int] | None:
    """Where gradients are recorded to, and how many steps; refuses what could not be written later."""
    if text is None:
        return None
    path, colon, steps = text.rpartition(":")
    if not (colon and path):
        path, steps = text, "1"
    if not (steps.isdecimal() and int(steps)):
        raise ConfigError(f"--record-gradients {text!r} is not FILE or FILE:STEPS, such as gradients.pt:4.")
    check_target(path)
    return Path(path), int(steps)


def check_auto(chooses: bool, plan: PlanFile | None, config: SyncConfig) -> None:
    """Refuse to choose what has been chosen."""
    if chooses and plan is not None:
        raise ConfigError("a plan has chosen already; give --plan or --method auto, not both.")
    if chooses and (config.is_dense or config.density == 1.0):
        raise ConfigError("where everything is sent there is nothing to choose; give a density, or leave auto out.")


def with_plan(
    options: argparse.Namespace, plan: PlanFile, asked: SyncConfig
) -> "tuple[LocalUpdates | None, SyncConfig]":
    """What a plan says, and on top of it what was given on the command line."""
    place = Place.from_environment()
    workers = place.workers if place else options.workers
    if workers is None:
        options.workers = workers = plan.workers
    plan.check_workers(workers)
    rule, planned = plan.config()
    settings = asked.to_dict()
    given = {name: settings[name] for name in options.given if name in settings}
    found = configure(planned, {**given, "density": asked.density} if "density" in given else given)
    update = options.update if "update" in options.given else rule or GRADIENTS
    rule, _ = resolve(update, given_local_settings(options))
    return rule, found


@contextlib.contextmanager
def watching(options: argparse.Namespace, rank: int, board: Board | None) -> Iterator["Observer"]:
    """On rank 0, the person in front of the screen, the log and the dashboard."""
    from spardl.train.report import Several

    with contextlib.ExitStack() as stack:
        everybody: list[Observer] = [stack.enter_context(observer(rank))]
        if rank == 0 and options.log_dir is not None:
            everybody.append(stack.enter_context(Log(options.log_dir, options.log_every)))
        if board is not None:
            everybody.append(board)
        yield Several(everybody)


def show(report: "TrainReport") -> None:
    costs = report.costs
    split = (
        ("computing", report.seconds_computing),
        ("selecting", costs.seconds_selecting),
        ("waiting", costs.seconds_waiting),
        ("transferring", costs.seconds_transferring),
    )
    total = report.seconds or 1.0
    table(
        f"{report.recipe}, {report.way}: {report.workers} workers, {report.parameters:,} parameters,"
        f" {report.steps:,} steps",
        ("", "at the end"),
        [
            *((f"test {name}", as_figure(name, value)) for name, value in _metric_first(report)),
            ("training loss", f"{report.train_loss:.4f}"),
            ("training time", as_seconds(report.seconds)),
            *((f"  {name}", f"{as_seconds(part)} ({100 * part / total:.0f} %)") for name, part in split),
            ("samples per second", f"{report.samples_per_second:,.0f}"),
            ("sent per step and worker", as_bytes(report.bytes_per_step)),
            ("sent in all, per worker", as_bytes(costs.bytes_sent)),
            ("achieved density", as_percent(report.achieved_density)),
        ],
        note=report.note,
    )


def _metric_first(report: "TrainReport") -> list[tuple[str, float]]:
    return sorted(report.figures.items(), key=lambda figure: figure[0] != report.metric)
