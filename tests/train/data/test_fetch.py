"""Files come whole, checked, and to their place, or not at all."""

import errno
import fcntl
import hashlib
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from spardl.errors import ConfigError
from spardl.train.data import fetch as module
from spardl.train.data.catalogue import CATALOGUE, Download, Listing
from spardl.train.data.fetch import ATTEMPTS, FetchError, fetch
from train.data.servers import Server, serving

CONTENT = bytes(range(256)) * 400


class Record:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int | None]] = []
        self.received = 0
        self.told: list[str] = []

    def begin(self, file: str, done: int, total: int | None) -> None:
        self.begun.append((file, done, total))

    def advance(self, count: int) -> None:
        self.received += count

    def tell(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


Offer = Callable[..., None]


@pytest.fixture
def offer(server: Server, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Put a file on the server and a data set `toy` of it into the catalogue."""

    def put(name: str, content: bytes, gives: str, *, checksum: str | None = "md5", unpack: bool = False) -> None:
        server.files[f"/{name}"] = content
        if checksum in ("md5", "sha256"):
            checksum = f"{checksum}:{hashlib.new(checksum, content).hexdigest()}"
        download = Download(f"https://example.org/{name}", gives, len(content), checksum, unpack)
        before = CATALOGUE.get("toy", Listing("a toy", "files", "toy"))
        monkeypatch.setitem(CATALOGUE, "toy", Listing("a toy", "files", "toy", (*before.downloads, download)))

    return put


def get(server: Server, directory: Path, watcher: Record | None = None) -> list[Path]:
    return fetch("toy", directory, watcher or Record(), url=server.url, pause=0.0)


def tar(files: Mapping[str, bytes], kind: str = "gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=f"w:{kind}") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def zipped(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED, link: str = "") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        if link:
            entry = zipfile.ZipInfo("top/link")
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(entry, link)
    return file.getvalue()


def tree(directory: Path) -> dict[str, bytes]:
    """All files, hidden ones too."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("checksum", ["md5", "sha256"])
@pytest.mark.parametrize("says_length", [True, False])
def test_a_file_comes_to_its_place(
    server: Server, offer: Offer, tmp_path: Path, checksum: str, says_length: bool
) -> None:
    """Under the name that loaders look for; folders are made, and nothing else stays."""
    server.says_length = says_length
    offer("remote.txt", CONTENT, "toy/local.txt", checksum=checksum)
    watcher = Record()
    assert get(server, tmp_path / "new", watcher) == [tmp_path / "new" / "toy" / "local.txt"]
    assert tree(tmp_path) == {"new/toy/local.txt": CONTENT}
    assert watcher.received == len(CONTENT)
    assert watcher.begun == [("remote.txt", 0, len(CONTENT))]


def test_what_is_there_is_not_fetched_again(server: Server, offer: Offer, tmp_path: Path) -> None:
    """Of several files only the missing ones are."""
    offer("one", b"1", "toy/one")
    offer("two", b"2", "toy/two")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "one").write_bytes(b"mine")
    watcher = Record()
    get(server, tmp_path, watcher)
    assert tree(tmp_path) == {"toy/one": b"mine", "toy/two": b"2"}
    assert server.asked == [("/two", None)]
    assert "already there" in watcher.told[0]


@pytest.mark.parametrize("resumes", [True, False])
def test_a_cut_connection_is_taken_up_where_it_broke(
    server: Server, offer: Offer, tmp_path: Path, resumes: bool
) -> None:
    """Only the rest is asked for; a server that sends everything again is understood too."""
    server.breaks, server.resumes = [1000, 5000], resumes
    offer("file", CONTENT, "file")
    watcher = Record()
    get(server, tmp_path, watcher)
    assert tree(tmp_path) == {"file": CONTENT}
    had = [0, 1000, 6000 if resumes else 5000]
    assert [asked for _, asked in server.asked] == [f"bytes={count}-" if count else None for count in had]
    assert [done for _, done, _ in watcher.begun] == (had if resumes else [0, 0, 0])
    assert sum("broke off after" in text for text in watcher.told) == 2


def test_after_some_attempts_the_part_is_kept_for_the_next_run(server: Server, offer: Offer, tmp_path: Path) -> None:
    """The sentence says how far it came and how to go on; the next run asks for the rest only."""
    server.breaks = [1000] * ATTEMPTS
    offer("file", CONTENT, "file")
    with pytest.raises(FetchError, match=r"5,000 bytes are kept; run the same command again"):
        get(server, tmp_path)
    assert tree(tmp_path) == {"file.part": CONTENT[:5000]}
    server.asked.clear()
    get(server, tmp_path)
    assert server.asked == [("/file", "bytes=5000-")]
    assert tree(tmp_path) == {"file": CONTENT}


def test_a_part_that_is_already_whole_needs_no_more_bytes(server: Server, offer: Offer, tmp_path: Path) -> None:
    """It is checked and gets its name."""
    offer("file", CONTENT, "file")
    (tmp_path / "file.part").write_bytes(CONTENT)
    get(server, tmp_path)
    assert tree(tmp_path) == {"file": CONTENT}


def test_a_part_longer_than_the_file_is_thrown_away(server: Server, offer: Offer, tmp_path: Path) -> None:
    """It was the beginning of something else."""
    offer("file", CONTENT, "file")
    (tmp_path / "file.part").write_bytes(CONTENT + b"more")
    get(server, tmp_path)
    assert tree(tmp_path) == {"file": CONTENT}


def test_a_busy_server_is_asked_again(server: Server, offer: Offer, tmp_path: Path) -> None:
    """503 and its like pass."""
    server.refusals = [503, 429]
    offer("file", CONTENT, "file")
    get(server, tmp_path)
    assert len(server.asked) == 3 and tree(tmp_path) == {"file": CONTENT}


@pytest.mark.parametrize("code", [403, 404, 410])
def test_a_file_that_is_gone_is_told_at_once(server: Server, offer: Offer, tmp_path: Path, code: int) -> None:
    """With the address and the option that names another."""
    server.refusals = [code]
    offer("file", CONTENT, "file")
    with pytest.raises(FetchError, match=f"/file answered {code} .*--url"):
        get(server, tmp_path)
    assert len(server.asked) == 1


def test_a_server_out_of_reach_is_told(offer: Offer, tmp_path: Path) -> None:
    """After the usual attempts, with the reason."""
    offer("file", CONTENT, "file")
    with serving() as gone:
        pass
    with pytest.raises(FetchError, match=f"in {ATTEMPTS} attempts.*refused"):
        get(gone, tmp_path)


def test_a_wrong_checksum_removes_the_file_and_shows_both(server: Server, offer: Offer, tmp_path: Path) -> None:
    """It never gets its name, and what is left does not spoil the next attempt."""
    expected = hashlib.md5(b"something else").hexdigest()
    offer("file", CONTENT, "file", checksum=f"md5:{expected}")
    with pytest.raises(FetchError, match=f"md5 sum {hashlib.md5(CONTENT).hexdigest()}, but should have {expected}"):
        get(server, tmp_path)
    assert tree(tmp_path) == {}


def test_a_resumed_part_of_another_file_is_found_out(server: Server, offer: Offer, tmp_path: Path) -> None:
    """The checksum is over all bytes, not those of this run."""
    offer("file", CONTENT, "file")
    (tmp_path / "file.part").write_bytes(b"not the beginning")
    with pytest.raises(FetchError, match="md5 sum"):
        get(server, tmp_path)
    get(server, tmp_path)
    assert tree(tmp_path) == {"file": CONTENT}


def test_where_no_checksum_is_known_the_one_found_is_shown(server: Server, offer: Offer, tmp_path: Path) -> None:
    """So that two people can compare theirs."""
    offer("file", CONTENT, "file", checksum=None)
    watcher = Record()
    get(server, tmp_path, watcher)
    assert hashlib.sha256(CONTENT).hexdigest() in watcher.told[-1]


FILES = {"top/a.txt": b"a" * 1000, "top/inner/b.txt": b"b", "extra.txt": b"not wanted"}


@pytest.mark.parametrize(
    ("name", "content"), [("toy.tar.gz", tar(FILES)), ("toy.tgz", tar(FILES)), ("toy.zip", zipped(FILES))]
)
def test_an_archive_is_unpacked_and_removed(
    server: Server, offer: Offer, tmp_path: Path, name: str, content: bytes
) -> None:
    """Its one folder that is wanted comes to its place."""
    offer(name, content, "toy/top", unpack=True)
    assert get(server, tmp_path) == [tmp_path / "toy" / "top"]
    assert tree(tmp_path) == {"toy/top/a.txt": b"a" * 1000, "toy/top/inner/b.txt": b"b"}


def escaping_link() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        member = tarfile.TarInfo("top/link")
        member.type, member.linkname = tarfile.SYMTYPE, "../../../etc"
        archive.addfile(member)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("toy.tar.gz", tar({"top/a": b"", "../../evil": b"evil"}), "a link or a way out of its folder; refused"),
        ("toy.tar.gz", escaping_link(), "a link or a way out of its folder; refused"),
        ("toy.tar.gz", tar(FILES)[:-30], "cannot be unpacked"),
        ("toy.tar.gz", b"not an archive", "cannot be unpacked"),
        ("toy.tar.gz", tar({"other/a": b""}), "holds other, but no folder top"),
        ("toy.zip", zipped({"top/a": b"", "../evil": b"evil"}), "would lie outside"),
        ("toy.zip", zipped({"top/a": b"", "/evil": b"evil"}), "would lie outside"),
        ("toy.zip", zipped({"top/a": b"", "..\\evil": b"evil"}), "would lie outside"),
        ("toy.zip", zipped({"top/a": b""}, link="/etc"), "would lie outside"),
        ("toy.zip", zipped(FILES)[:-30], "cannot be unpacked"),
        ("toy.zip", zipped(FILES, zipfile.ZIP_STORED).replace(b"aaa", b"axa", 1), "cannot be unpacked"),
    ],
)
def test_archives_that_are_damaged_or_reach_out_are_refused(
    server: Server, offer: Offer, tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    """Nothing lies outside the folder, and nothing half-done inside it."""
    offer(name, content, "data/toy/top", unpack=True)
    with pytest.raises(FetchError, match=sentence):
        get(server, tmp_path)
    assert tree(tmp_path) == {f"data/toy/{name}": content}
    assert os.listdir(tmp_path / "data" / "toy") == [name]


@pytest.mark.parametrize(("name", "content"), [("toy.tar.gz", tar(FILES)), ("toy.zip", zipped(FILES))])
def test_an_archive_of_absurd_size_is_refused(
    server: Server, offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    """Before anything of it is written."""
    monkeypatch.setattr(module, "LARGEST_CONTENT", 500)
    offer(name, content, "top", unpack=True)
    with pytest.raises(FetchError, match="would unpack to 1,011 bytes"):
        get(server, tmp_path)
    assert tree(tmp_path) == {name: content}


def full(*arguments: object, **settings: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("toy.tar.gz", tar(FILES), "tarfile.TarFile.makefile"),
        ("toy.zip", zipped(FILES), "shutil.copyfileobj"),
    ],
)
def test_a_disk_that_fills_up_while_unpacking_leaves_nothing_half_done(
    server: Server,
    offer: Offer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    method: str,
) -> None:
    """The archive is kept, so that the next run unpacks without another download."""
    offer(name, content, "top", unpack=True)
    with monkeypatch.context() as patched:
        patched.setattr(method, full)
        with pytest.raises(
            FetchError, match=r"the disk is full: there is no room for .*top\. .*what was received is kept"
        ):
            get(server, tmp_path)
    assert os.listdir(tmp_path) == [name]
    get(server, tmp_path)
    assert (tmp_path / "top" / "a.txt").read_bytes() == b"a" * 1000
    assert len(server.asked) == 1


def test_a_disk_that_fills_up_while_receiving_keeps_the_part(
    server: Server, offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told at once: more attempts would not make room."""
    offer("file", CONTENT * 10, "file")
    written = 0

    def little_room(file: io.BufferedWriter, chunk: bytes) -> None:
        nonlocal written
        with module._room_for(Path(file.name)):
            written += 1
            if written == 2:
                full()
            file.write(chunk)
            file.flush()

    with monkeypatch.context() as patched:
        patched.setattr(module, "_append", little_room)
        with pytest.raises(FetchError, match="the disk is full"):
            get(server, tmp_path)
    assert len(server.asked) == 1
    (part,) = tree(tmp_path).values()
    assert 0 < len(part) < len(CONTENT) * 10
    get(server, tmp_path)
    assert tree(tmp_path) == {"file": CONTENT * 10}


def test_a_file_that_was_put_there_by_hand_is_checked_too(server: Server, offer: Offer, tmp_path: Path) -> None:
    """A right archive is unpacked without a download, a wrong one refused and left alone."""
    offer("toy.zip", zipped(FILES), "top", unpack=True)
    (tmp_path / "toy.zip").write_bytes(b"something else")
    with pytest.raises(FetchError, match="was there already; remove it"):
        get(server, tmp_path)
    assert tree(tmp_path) == {"toy.zip": b"something else"}
    (tmp_path / "toy.zip").write_bytes(zipped(FILES))
    get(server, tmp_path)
    assert server.asked == [] and (tmp_path / "top" / "a.txt").exists()


def test_two_processes_do_not_write_one_file(server: Server, offer: Offer, tmp_path: Path) -> None:
    """The second one is told to wait."""
    offer("file", CONTENT, "file")
    with (tmp_path / "file.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="another process"):
            get(server, tmp_path)


def test_an_address_may_name_the_file_itself(server: Server, offer: Offer, tmp_path: Path) -> None:
    """Under whatever name it has there."""
    offer("file", CONTENT, "file")
    server.files["/mirror/other?name"] = CONTENT
    fetch("toy", tmp_path, Record(), url=f"{server.url}mirror/other?name", pause=0.0)
    assert tree(tmp_path) == {"file": CONTENT}


@pytest.mark.parametrize(
    ("name", "url", "sentence"),
    [
        ("digits", None, "cannot be downloaded: it comes with scikit-learn"),
        ("imagenet", None, "image-net.org"),
        ("cifar", None, "Did you mean cifar10"),
        ("mnist", "http://127.0.0.1/file", "must end in /"),
        ("cifar10", "file:///etc/passwd", "http"),
    ],
)
def test_what_cannot_be_fetched_is_refused(tmp_path: Path, name: str, url: str | None, sentence: str) -> None:
    """Before anything is asked for or written."""
    with pytest.raises(ConfigError, match=sentence):
        fetch(name, tmp_path / "new", Record(), url=url)
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """A file may stand in its way."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make the folder"):
        fetch("mnist", tmp_path / "file" / "data", Record())
