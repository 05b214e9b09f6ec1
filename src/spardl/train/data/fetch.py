"""Fetch the official files of a data set: resumed where a connection broke, checked, unpacked safely. No torch here.

A file is received under a name that ends in .part, and gets its own only when its checksum is right. An archive is
unpacked in a folder that vanishes, from which what is wanted moves to its place at once.
"""

import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import re
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from spardl.choices import check_choice
from spardl.errors import ConfigError, SparDLError
from spardl.train.data.catalogue import CATALOGUE, Download
from spardl.train.data.files import DAMAGE
from spardl.version import __version__

ATTEMPTS = 5
CHUNK = 1 << 18
TIMEOUT = 30.0
LARGEST_CONTENT = 1 << 33  # of an archive, unpacked
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
BEYOND_THE_END = 416
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FetchError(SparDLError):
    """A file could not be fetched."""


class Cut(Exception):
    """A connection broke off; what came before is kept."""


class Watcher(Protocol):
    """Who watches a download."""

    def begin(self, file: str, done: int, total: int | None) -> None:
        """A connection stands: `done` bytes are there already, of `total` if it is known."""

    def advance(self, count: int) -> None:
        """`count` more bytes have come."""

    def tell(self, text: str) -> None:
        """Say something that a person should know."""


def fetch(name: str, directory: Path, watcher: Watcher, *, url: str | None = None, pause: float = 1.0) -> list[Path]:
    """Bring the files of data set `name` into `directory`; return what they are there. What is there stays.

    `url` is another address for the file; if it ends in /, for the folder that holds all files under official names.
    After a cut connection it waits `pause` seconds, then twice as long, and so on.
    """
    downloads = _downloads(name, url)
    _make_folder(directory)
    found = []
    for download in downloads:
        path = directory / download.gives
        if path.exists():
            watcher.tell(f"{path} is already there; remove it to fetch it again.")
        else:
            _make_folder(path.parent)
            archive = _receive_file(download, _address(download, url), directory / download.file, watcher, pause)
            if download.unpack:
                watcher.tell(f"unpacking {archive.name}")
                _unpack(archive, path)
                archive.unlink()
        found.append(path)
    return found


def _downloads(name: str, url: str | None) -> tuple[Download, ...]:
    check_choice("data set", name, tuple(CATALOGUE), hint="`spardl data list` explains them")
    about = CATALOGUE[name]
    if not about.downloads:
        raise ConfigError(f"data set {name} cannot be downloaded: {about.advice}.")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url} is not an address that starts with http:// or https://.")
    if url is not None and not url.endswith("/") and len(about.downloads) > 1:
        names = ", ".join(download.remote_name for download in about.downloads)
        raise ConfigError(f"data set {name} has several files; --url must end in / and name the folder of {names}.")
    return about.downloads


def _address(download: Download, url: str | None) -> str:
    if url is None:
        return download.url
    return url + download.remote_name if url.endswith("/") else url


def _receive_file(download: Download, address: str, path: Path, watcher: Watcher, pause: float) -> Path:
    """The whole file, its checksum right, under its own name."""
    if path.exists():
        _check(download, path, watcher, f"{path} was there already; remove it and run the same command again.")
        return path
    part = path.with_name(f"{path.name}.part")
    with _locked(part) as file:
        _receive(address, file, download, watcher, pause)
        with _removed_on_error(part):
            _check(download, part, watcher, "It was removed; the file at this address may have changed or be damaged.")
        os.replace(part, path)
    return path


def _receive(address: str, file: BinaryIO, download: Download, watcher: Watcher, pause: float) -> None:
    """Append to `file` what is missing, over as many connections as it takes."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            _receive_once(address, file, download, watcher)
            return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in (*TRANSIENT, BEYOND_THE_END):
                raise FetchError(
                    f"{address} answered {error.code} {error.reason}; the file may have moved: --url names another"
                    " address."
                ) from error
            reason = f"it answered {error.code} {error.reason}"
        except Cut as error:
            reason = str(error)
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
        watcher.tell(f"{download.remote_name}: connection lost, {reason}")
    raise FetchError(
        f"{address} could not be fetched in {ATTEMPTS} attempts, the last of which ended thus: {reason}."
        f" {_size(file):,} bytes are kept; run the same command again to go on from there."
    )


def _receive_once(address: str, file: BinaryIO, download: Download, watcher: Watcher) -> None:
    have = _size(file)
    headers = {"User-Agent": f"spardl/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != BEYOND_THE_END:
            raise
        # Nothing comes after what is there: either that is all, or it is not the beginning of this file.
        if error.headers.get("Content-Range", "").strip() == f"bytes */{have}":
            error.close()
            return
        _truncate(file, 0)
        raise
    with response:
        start, total = _extent(response, have)
        _truncate(file, start)
        watcher.begin(download.remote_name, start, total or download.size)
        while chunk := response.read(CHUNK):
            _append(file, chunk)
            watcher.advance(len(chunk))
    if total is not None and _size(file) < total:
        raise Cut(f"it broke off after {_size(file):,} of {total:,} bytes")


def _extent(response: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """Where in the file the answer begins, and how long the file is; a server may ignore the wish for the rest only."""
    length = response.headers.get("Content-Length")
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if found and int(found[1]) <= have:
            return int(found[1]), int(found[2]) if found[2] != "*" else None
        raise Cut("it answered with another part of the file than was asked for")
    return 0, int(length) if length and length.isdecimal() else None


def _check(download: Download, path: Path, watcher: Watcher, advice: str) -> None:
    """Compare checksums, or show the one found where none is known."""
    if download.checksum is None:
        watcher.tell(f"{download.remote_name} has sha256 {_digest(path, 'sha256')}; its publisher names none.")
        return
    method, _, expected = download.checksum.partition(":")
    found = _digest(path, method)
    if found != expected:
        raise FetchError(f"{download.remote_name} has the {method} sum {found}, but should have {expected}. {advice}")


def _digest(path: Path, method: str) -> str:
    with path.open("rb") as file:
        # Of known files, against damage: md5 is what their publishers offer.
        return hashlib.file_digest(file, lambda: hashlib.new(method, usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, goal: Path) -> None:
    """Unpack the folder of `goal`'s name into its place: whole, or not at all."""
    with _room_for(goal), tempfile.TemporaryDirectory(dir=goal.parent, prefix=".unpacking-") as scratch:
        try:
            if archive.suffix == ".zip":
                _unzip(archive, Path(scratch))
            else:
                _untar(archive, Path(scratch))
        except (tarfile.TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError, *DAMAGE) as error:
            raise FetchError(f"{archive} cannot be unpacked ({error}); remove it and fetch it again.") from error
        unpacked = Path(scratch) / goal.name
        if not unpacked.is_dir():
            held = ", ".join(sorted(os.listdir(scratch))[:5]) or "nothing"
            raise FetchError(f"{archive} holds {held}, but no folder {goal.name}; it is another archive.")
        os.replace(unpacked, goal)


def _untar(archive: Path, folder: Path) -> None:
    """Plain files and folders only. tarfile's data filter looks at the rest; it alone has been got round by links."""
    if not hasattr(tarfile, "data_filter"):
        raise FetchError("this Python's tarfile cannot unpack safely; use Python 3.11.4 or newer.")
    with tarfile.open(archive) as members:
        for member in members:
            path = PurePosixPath(member.name)
            if not (member.isreg() or member.isdir()) or path.is_absolute() or ".." in path.parts:
                raise FetchError(f"{archive} holds {member.name!r}, a link or a way out of its folder; refused.")
        _bound(archive, sum(member.size for member in members))
        members.extractall(folder, filter="data")


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            path = PurePosixPath(member.filename.replace("\\", "/"))
            link = stat.S_ISLNK(member.external_attr >> 16)
            if link or path.is_absolute() or ".." in path.parts or ":" in member.filename:
                raise FetchError(f"{archive} holds {member.filename!r}, which would lie outside its folder; refused.")
        _bound(archive, sum(member.file_size for member in members.infolist()))
        members.extractall(folder)


def _bound(archive: Path, content: int) -> None:
    if content > LARGEST_CONTENT:
        raise FetchError(f"{archive} would unpack to {content:,} bytes, more than any data set here; refused.")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}.") from error


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """The file, for this process alone."""
    try:
        file = part.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write {part}: {error.strerror}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(f"another process is receiving {part}; wait for it.") from None
        yield file


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except FetchError:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _room_for(path: Path) -> Iterator[None]:
    """Say it in a sentence when a disk is full or cannot be written."""
    try:
        yield
    except DAMAGE:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise FetchError(
                f"the disk is full: there is no room for {path}. Make some and run the same command again; what was"
                " received is kept."
            ) from error
        raise FetchError(f"cannot write {path}: {error.strerror or error}.") from error


def _append(file: BinaryIO, chunk: bytes) -> None:
    with _room_for(Path(file.name)):
        file.write(chunk)
        file.flush()


def _truncate(file: BinaryIO, size: int) -> None:
    with _room_for(Path(file.name)):
        file.truncate(size)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
