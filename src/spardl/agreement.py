"""What ranks tell each other beside gradients, and that they agree before anything is sent."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from spardl.errors import ConfigMismatch
from spardl.version import __version__

Gather = Callable[[str], list[str]]  # every rank's text, in rank order; collective


def gather_values(gather: Gather, value: Any) -> list[Any]:
    """Every rank's value, in rank order: whatever JSON can write, and nothing that runs. Collective."""
    return [json.loads(text) for text in gather(json.dumps(value))]


def check_agreement(facts: dict[str, Any], gather: Gather, what: str) -> None:
    """Raise `ConfigMismatch` on all ranks, naming two that differ, and in what. Collective.

    `gather` gives every rank's text. The facts travel only if their fingerprints differ.
    """
    text = json.dumps({"spardl version": __version__, **facts})
    if len(set(gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    texts = gather(text)
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        first, other = json.loads(texts[0]), json.loads(text)
        for key in sorted(set(first) | set(other)):
            if first.get(key) != other.get(key):
                ours, theirs = _difference(first.get(key), other.get(key))
                raise ConfigMismatch(
                    f"ranks 0 and {rank} differ in {what}: {key} is {ours} on rank 0 and {theirs} on rank {rank};"
                    " start all ranks with the same settings and the same model.",
                    ranks=(0, rank),
                )


def _difference(first: object, other: object) -> tuple[str, str]:
    """The parts worth showing: of two lists, only the first place where they part."""
    if isinstance(first, list) and isinstance(other, list):
        if len(first) != len(other):
            return f"{len(first)} items", f"{len(other)} items"
        return next((repr(a), repr(b)) for a, b in zip(first, other, strict=True) if a != b)
    return repr(first), repr(other)
