"""Each rank's state in a file of its own, in a checkpoint folder that somebody else has made.

Frameworks that save into folders write what is each rank's own, as random states are, beside what all ranks share. So
nothing travels when a checkpoint is saved. A file is written under another name and renamed when it is whole, and read
as tensors and numbers only, never as code.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spardl.errors import CheckpointError, StateError
from spardl.integrations.handle import SyncHandle

STEM = "spardl"


def rank_file(folder: Path, rank: int, workers: int, stem: str = STEM) -> Path:
    """`spardl-00001-of-00004.pt`."""
    return folder / f"{stem}-{rank:05d}-of-{workers:05d}.pt"


def save(sync: SyncHandle, folder: str | Path, stem: str = STEM) -> Path:
    """Write this rank's state. Every rank calls it, where it can see the folder; nothing is sent.

    Where several models are saved in one folder, each has a `stem` of its own.
    """
    folder = Path(folder)
    rank, workers = _place(sync)
    path = rank_file(folder, rank, workers, stem)
    partial = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(sync.state_dict(), partial)
        partial.replace(path)
        if rank == 0:  # what a world of another size has left here is of an older checkpoint
            for other in [each for each, (_, size) in _found(folder, stem).items() if size != workers]:
                other.unlink()
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}", writing=True) from error
    return path


def load(sync: SyncHandle, folder: str | Path, stem: str = STEM) -> None:
    """Go on from what was saved in this folder: exactly, or, with another number of workers, from the mean.

    Raises:
        CheckpointError: there is none, not all of it, or it cannot be read.
        StateError: it is another model's.
    """
    folder = Path(folder)
    rank, workers = _place(sync)
    own = rank_file(folder, rank, workers, stem)
    if own.exists():
        sync.load_state_dict(_read(own))
        return
    sizes = {size for _, size in _found(folder, stem).values()}
    if not sizes:
        raise CheckpointError(f"{folder} holds no state of spardl, such as {own.name}; was it saved with it?")
    if workers in sizes or len(sizes) > 1:
        raise CheckpointError(
            f"{folder} has no {own.name}: the checkpoint is not whole, or lies on another machine's disk."
        )
    paths = [rank_file(folder, each, size, stem) for size in sizes for each in range(size)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{folder} has no {missing[0]}; to go on with another number of workers, {workers}, every rank reads the"
            f" files of all {len(paths)}."
        )
    states = [_read(path) for path in paths]
    sync.load_state_dict({**states[0], "ranks": states})


def _place(sync: SyncHandle) -> tuple[int, int]:
    """This rank among those of the whole run: files of several replica groups lie in one folder."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return sync.session.transport.rank, sync.session.transport.workers


def _found(folder: Path, stem: str) -> dict[Path, tuple[int, int]]:
    """Rank and number of workers of each state in this folder."""
    name = re.compile(rf"{re.escape(stem)}-(\d+)-of-(\d+)\.pt")
    matches = {path: name.fullmatch(path.name) for path in sorted(folder.glob(f"{stem}-*-of-*.pt"))}
    return {path: (int(match[1]), int(match[2])) for path, match in matches.items() if match is not None}


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{path} cannot be read: it is damaged, or no plain state ({first_line}).") from error
    if not isinstance(state, dict):
        raise StateError(f"{path} holds no state that spardl has saved.")
    return state
