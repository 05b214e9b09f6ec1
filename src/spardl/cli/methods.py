"""`spardl methods`."""

import argparse
from typing import TYPE_CHECKING

from spardl.cli.options import add_json_option
from spardl.cli.output import records, table
from spardl.cli.settings_table import rows
from spardl.collectives.methods.registry import method_class, method_names
from spardl.config import options_of

if TYPE_CHECKING:
    from spardl.collectives.method import About

SUMMARY = "list the synchronisation methods, with paper and cost, or all settings"


def add_options(parser: argparse.ArgumentParser) -> None:
    what = "list the settings instead: what all methods share, and the options of each, with their defaults"
    parser.add_argument("--settings", action="store_true", help=what)
    add_json_option(parser, "one record per method, or per setting")


def run(options: argparse.Namespace) -> int:
    return _show_settings(options) if options.settings else _show_methods(options)


def _show_methods(options: argparse.Namespace) -> int:
    found = {name: method_class(name).about for name in method_names()}
    chosen = {name: ", ".join(options_of(name)) for name in found}
    with records(options.json) as write:
        for name, about in found.items():
            record = {"method": name, "paper": about.paper, "rounds": str(about.rounds), "entries": str(about.entries)}
            write({**record, "note": about.note, "options": list(options_of(name))})
    if options.json != "-":
        table(
            "Methods",
            ("method", "paper", "rounds", "entries that a worker sends", "options"),
            [(name, about.paper, str(about.rounds), _with_note(about), chosen[name]) for name, about in found.items()],
            note="n elements, k = density x n entries, P workers in d teams",
            figures=False,
        )
    return 0


def _show_settings(options: argparse.Namespace) -> int:
    found = list(rows(method_names()))
    with records(options.json) as write:
        for row in found:
            write(row._asdict())
    if options.json != "-":
        table(
            "Settings",
            ("setting", "default", "choices", "methods", "what it does"),
            found,
            note="keywords of attach, and options of spardl train: --dense-below for dense_below",
            figures=False,
        )
    return 0


def _with_note(about: "About") -> str:
    return f"{about.entries} ({about.note})" if about.note else str(about.entries)
