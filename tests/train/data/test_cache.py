"""What was parsed is kept, and never in the way."""

from pathlib import Path

import numpy as np
import pytest

from spardl.train.data.cache import Arrays, cached


class Count:
    """Builds, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Arrays:
        self.times += 1
        return {"numbers": np.arange(5)}


def test_an_entry_is_built_once_per_key() -> None:
    """Another key is another entry."""
    build = Count()
    for key in (("a", 1), ("a", 1), ("a", 2)):
        assert cached("test", key, build)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert build.times == 2


@pytest.mark.parametrize("content", [b"", b"nothing that numpy knows", b"PK\x03\x04 cut off"])
def test_a_damaged_entry_is_built_again(own_cache: Path, content: bytes) -> None:
    """And replaced by a sound one; no scratch file stays."""
    build = Count()
    cached("test", (1,), build)
    (entry,) = own_cache.iterdir()
    entry.write_bytes(content)
    cached("test", (1,), build)
    cached("test", (1,), build)
    assert build.times == 2
    assert list(own_cache.iterdir()) == [entry]


def test_entries_with_pickles_are_never_loaded(own_cache: Path) -> None:
    """An entry may hold plain numbers only."""
    build = Count()
    cached("test", (1,), build)
    (entry,) = own_cache.iterdir()
    np.savez(entry, numbers=np.array([{}], dtype=object))
    cached("test", (1,), build)
    assert build.times == 2


def test_a_cache_that_cannot_be_written_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes longer then, that is all."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARDL_CACHE", str(tmp_path / "file" / "cache"))
    assert cached("test", (1,), Count())["numbers"].tolist() == [0, 1, 2, 3, 4]


def test_a_full_disk_leaves_no_part_of_an_entry(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry is whole or absent."""

    def full(file, **arrays):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    cached("test", (1,), Count())
    assert list(own_cache.iterdir()) == []
