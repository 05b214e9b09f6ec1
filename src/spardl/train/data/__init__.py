"""Data sets that recipes train on, by name. One file per format; none is loaded before it is asked for."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from spardl.choices import check_choice
from spardl.extras import require

if TYPE_CHECKING:
    from spardl.train.dataset import DataSet

# name: module:function. A function takes the directory that holds the files (None if none was named) and options.
DATASETS: dict[str, str] = {
    "digits": "spardl.train.data.digits:digits",
    "mnist": "spardl.train.data.idx:mnist",
    "fashion-mnist": "spardl.train.data.idx:fashion_mnist",
    "cifar10": "spardl.train.data.cifar:cifar10",
    "cifar100": "spardl.train.data.cifar:cifar100",
    "imagenet": "spardl.train.data.folders:imagenet",
    "folders": "spardl.train.data.folders:folders",
    "imdb": "spardl.train.data.imdb:imdb",
    "ptb": "spardl.train.data.text:ptb",
    "wikitext-2": "spardl.train.data.text:wikitext2",
    "wikitext-2-masked": "spardl.train.data.text:wikitext2_masked",
    "pydoc": "spardl.train.data.text:pydoc",
    "pydoc-stream": "spardl.train.data.text:pydoc_stream",
    "pydoc-masked": "spardl.train.data.text:pydoc_masked",
    "text": "spardl.train.data.text:text",
    "text-masked": "spardl.train.data.text:text_masked",
    "tinyshakespeare": "spardl.train.data.text:tinyshakespeare",
    "ml-latest-small": "spardl.train.data.movielens:ml_latest_small",
    "ml-100k": "spardl.train.data.movielens:ml_100k",
    "ml-1m": "spardl.train.data.movielens:ml_1m",
    "ml-20m": "spardl.train.data.movielens:ml_20m",
}

# What a data set needs that the core does not bring: the module, and what it does here.
PACKAGES: dict[str, tuple[str, str]] = {
    "digits": ("sklearn", "the digits come with scikit-learn"),
    "imagenet": ("PIL", "images are decoded by Pillow"),
    "folders": ("PIL", "images are decoded by Pillow"),
}


def check_packages(name: str) -> None:
    """Refuse a data set whose package is not installed. Nothing is imported."""
    if name in PACKAGES:
        require(*PACKAGES[name])


def load_data(name: str, directory: Path | None = None, **options: int) -> "DataSet":
    """The data set of this name; `directory` is where its official files lie."""
    check_choice("data set", name, tuple(DATASETS))
    check_packages(name)
    module, _, function = DATASETS[name].partition(":")
    data: DataSet = getattr(importlib.import_module(module), function)(directory, **options)
    return data
