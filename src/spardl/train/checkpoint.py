"""One checkpoint: a folder that is whole, or not there at all.

`step-00000120` holds what all ranks have in common (`common.pt`: parameters, averaged BatchNorm statistics, optimizer),
each rank's own (`rank-00003.pt`: residuals, velocities and controllers, its BatchNorm statistics, what a language model
carries, the epoch so far; with local updates also its weights and optimizer), and `meta.json` with position, history,
settings, and size and sha256 of every other file.
Learning rate, order of the data and everything random are functions of the step, and need no file.

It is written under another name, each file flushed to the disk, and gets its own by one rename when all ranks have
written. All the same, sizes and sums are compared before one is used, and files are read as tensors and numbers only,
never as code.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spardl.errors import CheckpointError

FORMAT = 1
META, COMMON = "meta.json", "common.pt"

State = dict[str, Any]
Facts = dict[str, Any]  # of a file: its size and sha256


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is until it is whole."""
    return folder.with_name(folder.name + ".partial")


def write_state(path: Path, state: State) -> Facts:
    """Write a file, down to the disk; return its size and sha256."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        # torch's writer hides what the system has said, most often that there is no room left.
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path.name} cannot be written to {path.parent}, where {free:,} bytes are free") from error
    return facts_of(path)


def publish(folder: Path, meta: Mapping[str, Any]) -> None:
    """Complete a checkpoint whose other files are written, and give it its name."""
    place = unfinished(folder)
    with (place / META).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **meta}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush(place)
    if folder.exists():
        discard(folder)
    place.rename(folder)
    _flush(folder.parent)


def discard(folder: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that no half of one is ever taken for a whole."""
    doomed = unfinished(folder.with_name(folder.name + ".old"))
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read_meta(folder: Path) -> dict[str, Any]:
    """Position, history, settings and file list; raises `CheckpointError` where they cannot be read."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint {folder} has no {META}, so it is not whole.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {META} cannot be read ({error}).") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        version = meta.get("format") if isinstance(meta, dict) else None
        raise CheckpointError(f"the checkpoint {folder} has format {version!r}; this version reads {FORMAT}.")
    wanted = {"step": int, "identity": dict, "history": list, "files": dict}
    wrong = [name for name, kind in wanted.items() if not isinstance(meta.get(name), kind)]
    if not wrong and (isinstance(meta["step"], bool) or meta["step"] < 0):
        wrong = ["step"]
    if wrong:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {META} has no proper {wrong[0]!r}.")
    return meta


def check_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Compare sizes: cheap, and finds files that are missing or cut off."""
    for name, facts in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or not isinstance(facts, dict) or size != facts.get("size"):
            state = "is missing" if size is None else f"has {size} bytes instead of {_field(facts, 'size')}"
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} {state}.")


def read_state(folder: Path, name: str, files: Mapping[str, Any]) -> State:
    """A file whose size and sum are those in `files`."""
    if name not in files:
        raise CheckpointError(f"the checkpoint {folder} has no {name}.")
    check_files(folder, {name: files[name]})
    if facts_of(folder / name)["sha256"] != _field(files[name], "sha256"):
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {name} is not what was written (its sha256 differs)."
        )
    try:
        state: State = torch.load(folder / name, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file that was made to look like one brings about
        first_line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"the checkpoint {folder} cannot be used: {name} is no plain state ({first_line})."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the checkpoint {folder} cannot be used: {name} is no plain state.")
    return state


def facts_of(path: Path) -> Facts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _field(facts: Any, name: str) -> Any:
    return facts.get(name) if isinstance(facts, dict) else None


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
