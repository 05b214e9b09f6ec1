"""Data sets that recipes train on, by name. One file per format; none is loaded before it is asked for."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from spardl.config import check_choice

if TYPE_CHECKING:
    from spardl.train.dataset import DataSet

# name: module:function. A function takes the directory that holds the files (None if none was named) and options.
DATASETS: dict[str, str] = {
    "digits": "spardl.train.data.digits:digits",
}


def load_data(name: str, directory: Path | None = None, **options: int) -> "DataSet":
    """The data set of this name; `directory` is where its official files lie."""
    check_choice("data set", name, tuple(DATASETS))
    module, _, function = DATASETS[name].partition(":")
    data: DataSet = getattr(importlib.import_module(module), function)(directory, **options)
    return data
