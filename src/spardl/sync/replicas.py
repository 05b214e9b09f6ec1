"""Whether all ranks hold the same tensors, by their hashes: for those who want to see it and not to believe it."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from spardl.agreement import Gather
from spardl.errors import ReplicaError


def compare(tensors: Mapping[str, Tensor], gather: Gather, step: int) -> None:
    """Raise `ReplicaError` on all ranks if the tensors of any differ in a bit. Collective; `gather` collects texts.

    Costs a hash of every tensor and the gathering of 64 bytes; the hashes of single tensors travel only if need be.
    """
    hashes = {name: _hash_of(tensor) for name, tensor in tensors.items()}
    whole = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    found = gather(whole)
    usual, count = Counter(found).most_common(1)[0]
    if count == len(found):
        return
    everyone = [json.loads(text) for text in gather(json.dumps(hashes))]
    reference = everyone[found.index(usual)]
    others = [rank for rank, each in enumerate(found) if each != usual]
    name = next(name for name in hashes if any(everyone[rank].get(name) != reference.get(name) for rank in others))
    same = [rank for rank in range(len(found)) if rank not in others]
    raise ReplicaError(
        f"before step {step} the tensors of {_listed(others)} differ from those of {_listed(same)}, first in {name!r}."
        " Ranks must change weights in the same way, and hear the same; go back to a checkpoint from before.",
        ranks=tuple(others),
        tensor=name,
    )


def _hash_of(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
