"""How loaders find and open official files, and what they say when something is wrong with one."""

import contextlib
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

from spardl.errors import ConfigError, DataError
from spardl.train.data.catalogue import CATALOGUE

# What a decompressor raises at bytes that it cannot have written.
DAMAGE = (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)


def places(name: str, directory: Path | None, *official: str) -> list[Path]:
    """Existing folders in which the files of data set `name` may lie, the likeliest first.

    That is the directory, its subfolder for this set, and the folders that the official archive makes in either.
    """
    if directory is None:
        raise ConfigError(f"data set {name} is read from files: name their directory with --data-dir.{_offer(name)}")
    if not directory.is_dir():
        raise DataError(f"data set {name} is to be read from {directory}, but there is no such folder.{_offer(name)}")
    roots = [directory / CATALOGUE[name].folder, directory] if CATALOGUE[name].folder else [directory]
    found = [root / folder for folder in (*official, "") for root in roots]
    return [folder for folder in found if folder.is_dir()]


def missing(name: str, directory: Path | None) -> DataError:
    """The files of a data set are not where they were looked for."""
    about = CATALOGUE[name]
    where = f"neither in {directory} nor in its subfolder {about.folder}" if about.folder else f"not in {directory}"
    return DataError(f"data set {name} needs {about.needs}: found {where}.{_offer(name, directory)}")


def _offer(name: str, directory: Path | None = None) -> str:
    about = CATALOGUE[name]
    if about.downloads:
        return f" `spardl data fetch {name} --data-dir {directory or 'DIR'}` downloads it."
    return f" Nothing can be downloaded: {about.advice}."


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into a sentence that names it."""
    try:
        yield
    except DAMAGE as error:
        raise DataError(f"{path} is damaged or cut off ({error}); get it again.") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


def read_text(path: Path) -> str:
    """A whole UTF-8 file, its line ends made `\\n`."""
    with reading(path):
        return decode(path.read_bytes(), str(path)).replace("\r\n", "\n")


def decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x} ({error.reason})."
        ) from None


def subset_note(what: str, train: int, test: int, official: tuple[int, int]) -> str:
    """What a reader must know of a set with other counts than the official one: nothing if they agree."""
    counts = zip(("training", "test"), (train, test), official, strict=True)
    parts = [f"{found:,} of {whole:,} {split} {what}" for split, found, whole in counts if found < whole]
    if parts:
        return f"a subset: {' and '.join(parts)}"
    if (train, test) != official:
        return f"not the official set: {train:,} training {what} and {test:,} test {what}"
    return ""


def check_window(window: int, tokens: int, name: str) -> None:
    """Refuse windows that do not fit a text."""
    if window < 1:
        raise ConfigError(f"windows of {window} tokens hold nothing; give 1 or more.")
    if window >= tokens:
        raise ConfigError(f"windows of {window:,} tokens do not fit {name}, which has {tokens:,}; use shorter ones.")
