"""Parsed data sets, kept between runs where parsing takes long."""

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.generic]]


def cache_directory() -> Path:
    """`$SPARDL_CACHE`, or the usual place under the home directory."""
    named = os.environ.get("SPARDL_CACHE")
    return Path(named) if named else Path("~/.cache/spardl").expanduser()


def cached(name: str, key: tuple[object, ...], build: Callable[[], Arrays]) -> Arrays:
    """What `build` returned for this key, now or in an earlier run.

    A key names everything that the result depends on. A damaged entry is made again; one that cannot be written is not
    missed. Several processes may do this at once: each sees whole entries only.
    """
    path = cache_directory() / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.npz"
    try:
        with np.load(path, allow_pickle=False) as entry:
            return {field: entry[field] for field in entry.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        arrays = build()
    with contextlib.suppress(OSError):
        _write(path, arrays)
    return arrays


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
