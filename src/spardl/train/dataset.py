"""A data set as a recipe uses it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spardl.train.source import Source
from spardl.train.tasks import Task


@dataclass(frozen=True)
class DataSet:
    """What a model learns from and what it is judged by.

    facts  what a model must know of it, such as classes, channels, vocabulary, users or items
    note   what a reader of results should know, such as that the files hold a subset of the official set
    """

    name: str
    train: Source
    test: Source
    task: Task
    facts: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
