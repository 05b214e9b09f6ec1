"""`spardl methods`."""

import argparse

from spardl.cli.options import add_json_option
from spardl.cli.output import records, table
from spardl.config import METHODS

SUMMARY = "list the synchronisation methods, with paper and cost"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser, "one record per method")


def run(options: argparse.Namespace) -> int:
    from spardl.collectives.method import method_class

    found = {name: method_class(name).about for name in METHODS}
    with records(options.json) as write:
        for name, about in found.items():
            write({"method": name, "paper": about.paper, "rounds": about.rounds, "entries": about.entries})
    if options.json != "-":
        table(
            "Methods",
            ("method", "paper", "rounds", "entries that a worker sends"),
            [(name, about.paper, about.rounds, about.entries) for name, about in found.items()],
            note="n elements, k = density x n entries, P workers in d teams",
            figures=False,
        )
    return 0
