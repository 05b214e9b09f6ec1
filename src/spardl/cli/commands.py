"""Which commands there are, and how their arguments are read."""

import argparse
from collections.abc import Sequence

from spardl.choices import check_choice
from spardl.cli import bench, compare, data, doctor, methods, plan, recipes, simulate, train
from spardl.cli.file import read_options
from spardl.cli.parser import Parser
from spardl.version import __version__

# Each module has SUMMARY, add_options(parser) and run(options).
COMMANDS = {
    "train": train,
    "compare": compare,
    "recipes": recipes,
    "data": data,
    "bench": bench,
    "plan": plan,
    "simulate": simulate,
    "methods": methods,
    "doctor": doctor,
}

DESCRIPTION = "Sparse gradient synchronisation for data-parallel PyTorch."


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one command, with `run` to carry it out and `arguments` to start it again. `given` are the names
    of those that stand there or in a file, rather than by default."""
    if not arguments:
        arguments = ["--help"]
    parser, commands = build_parser(arguments[:1])
    if not arguments[0].startswith("-"):
        check_choice("command", arguments[0], tuple(COMMANDS), hint="`spardl COMMAND --help` explains one")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        (commands[options.command] if options.command else parser).refuse(unknown)
    if options.command is None:
        parser.error("which command")
    command, from_file = commands[options.command], {}
    if getattr(options, "config", None) is not None:
        # As defaults, so that what the command line says counts more.
        from_file = read_options(options.config, command)
        command.set_defaults(**from_file)
        options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    options.given = _given(command, arguments) | set(from_file)
    return options


def _given(command: Parser, arguments: Sequence[str]) -> set[str]:
    """The names of options that stand among the arguments; they are never abbreviated."""
    known = command._option_string_actions
    words = (argument.partition("=")[0] for argument in arguments)
    return {known[word].dest for word in words if word in known}


def build_parser(only: Sequence[str] = tuple(COMMANDS)) -> tuple[Parser, dict[str, Parser]]:
    """The parser, and the one of each command. Options are added for `only` these: some are those of methods, whose
    files have to be imported for it."""
    parser = Parser(prog="spardl", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"spardl {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands = {}
    for name, module in COMMANDS.items():
        command = subparsers.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        if name in only:
            module.add_options(command)
        command.set_defaults(run=module.run)
        commands[name] = command
    return parser, commands
