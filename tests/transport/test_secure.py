"""Encrypted connections carry the same messages, of any size, between those who have the key and nobody else."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spardl
from local_updates import attach, shared_weights
from messages import message
from processes import on_processes
from spardl.collectives.program import AllReduce, Round
from spardl.errors import ConfigError, PeerError
from spardl.transport.choice import transport_named
from spardl.transport.direct.link import Gone, Link, mark_of
from spardl.transport.direct.pump import Pace, finish
from spardl.transport.direct.secure import CHUNK, Key, SecureLine, secured
from training import all_equal, mlp, sgd, train

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")

MARK = mark_of("test")


def make_key(folder: Path, name: str = "run.pem") -> str:
    """By the commands that SECURITY.md has."""
    key, certificate = folder / name, folder / f"{name}.crt"
    command = "openssl req -x509 -newkey ed25519 -nodes -days 3650 -subj /CN=spardl"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    key.write_bytes(key.read_bytes() + certificate.read_bytes())
    key.chmod(0o600)
    return str(key)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_key(tmp_path_factory.mktemp("key"))


def pair(first: Key, second: Key) -> list[Any]:
    """Both ends of one line, or what each was told."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)

    def one(rank: int) -> Any:
        try:
            return secured({1 - rank: ends[rank]}, rank, (first, second)[rank], timeout=20)[1 - rank]
        except PeerError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def linked(lines: list[SecureLine]) -> list[Link]:
    for line in lines:
        line.getpeername = lambda: ("here", 0)  # type: ignore[method-assign]
        line.setsockopt = lambda *_: None  # type: ignore[method-assign]
    return [Link(1 - rank, line, 20.0, blocks=False) for rank, line in enumerate(lines)]


def move(links: list[Link]) -> None:
    finish(links, Pace(time.monotonic(), 20.0, lambda _: 0.0))


@pytest.mark.parametrize("size", [0, 1, 16, CHUNK - 16, CHUNK, 5 * CHUNK + 3, 3_000_000])
def test_messages_of_any_size_cross_each_other(key: str, size: int) -> None:
    """Several one after the other, so that one arrives while the one before is being read."""
    first, second = linked(pair(Key(key), Key(key)))
    source = np.random.default_rng(size)
    for _ in range(3):
        payloads = [source.integers(0, 256, size, np.uint8) for _ in range(2)]
        for link, payload in zip((first, second), payloads, strict=True):
            link.post(payload, MARK)
            link.expect(size, MARK)
        move([first, second])
        assert (first.take() == payloads[1]).all() and (second.take() == payloads[0]).all()


def test_what_came_early_is_not_waited_for(key: str) -> None:
    """A peer has sent three messages before the first is expected: the system has handed over all of them at once."""
    first, second = linked(pair(Key(key), Key(key)))
    for number in range(3):
        first.post(np.full(100, number, np.uint8), MARK)
    for number in range(3):
        second.expect(100, MARK)
        move([second])
        assert (second.take() == number).all()


def test_nothing_can_be_read_or_changed_on_the_way(key: str) -> None:
    """What travels does not hold the message, and one bit that was changed ends the line."""
    lines = pair(Key(key), Key(key))
    first, second = linked(lines)
    tapped: list[bytes] = []
    send = lines[0]._line

    class Tap:
        def send(self, data: memoryview, flags: int = 0) -> int:
            tapped.append(bytes(data))
            changed = bytearray(data)
            changed[len(changed) // 2] ^= 1
            return send.send(changed, flags)

        def __getattr__(self, name: str) -> Any:
            return getattr(send, name)

    lines[0]._line = Tap()
    secret = b"these weights are nobody's business" * 10
    first.post(np.frombuffer(secret, np.uint8), MARK)
    assert tapped and secret[:20] not in b"".join(tapped)
    second.expect(len(secret), MARK)
    with pytest.raises(Gone, match="cannot be reached any more"):
        move([second])


def test_another_key_is_refused_by_both(key: str, tmp_path: Path) -> None:
    other = make_key(tmp_path)
    ends = pair(Key(key), Key(other))
    assert any(isinstance(end, PeerError) and "give all ranks the same file" in str(end) for end in ends)
    for end in ends:
        if isinstance(end, SecureLine):  # who calls learns it with the first message
            with pytest.raises((OSError, AssertionError)):
                assert end.recv(10) == b"never"
                raise OSError("it was let go")


def test_a_stranger_without_a_key_gets_nowhere(key: str) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    line = SecureLine(ours, Key(key), called=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def call() -> None:
        with pytest.raises(OSError), context.wrap_socket(theirs) as stranger:
            stranger.settimeout(20)
            stranger.send(b"let me in")
            if not stranger.recv(10):
                raise ConnectionError("hung up on")

    caller = threading.Thread(target=call)
    caller.start()
    with pytest.raises(OSError, match=r"(?i)certificate"):
        line.shake_hands(time.monotonic() + 20)
    ours.close()
    caller.join(20)


def test_a_key_that_others_can_read_is_warned_of(key: str, tmp_path: Path) -> None:
    path = tmp_path / "open.pem"
    path.write_bytes(Path(key).read_bytes())
    path.chmod(0o644)
    with pytest.warns(spardl.SparDLWarning, match="chmod 600"):
        Key(path)


@pytest.mark.parametrize("content", ["", "no key at all"])
def test_a_file_that_is_no_key_is_refused_in_a_sentence(content: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    for _ in range(2):
        with pytest.raises(ConfigError, match="is no file with a key and a certificate"):
            Key(path)
        path.write_text(content)
        path.chmod(0o600)


def learn(rank: int, workers: int, key: str) -> Any:
    transport = transport_named("auto", None, timeout=30, device="cpu", encrypt=key)
    total = torch.full((1000,), float(rank))
    transport.perform(AllReduce(total))
    big = np.full(400_000, rank, np.uint8)
    to, source = (rank + 1) % workers, (rank - 1) % workers
    (arrived,) = transport.perform(Round([message(to, big)], [(source, big.size)], "swap"))
    assert (arrived == source).all() and transport.gather_texts(str(rank)) == [str(each) for each in range(workers)]
    transport.close()
    weights = []
    for encrypt in (None, key):
        model = mlp()
        optimizer = sgd(model)
        sync = attach(model, optimizer, density=0.1, encrypt=encrypt)
        train(model, optimizer, range(4))
        weights.append(shared_weights(sync, model))
        sync.detach()
    return float(total[0]), weights


def test_training_comes_to_the_same_weights_as_in_clear(key: str) -> None:
    ranks = on_processes(3, learn, key)
    assert all(total == 3.0 for total, _ in ranks)
    assert all_equal(weights for _, both in ranks for weights in both)


def refused(rank: int, workers: int, key: str) -> list[str]:
    texts = []
    for settings in ({"transport": "torch"}, {"method": "auto"}):
        model = mlp()
        with pytest.raises(ConfigError) as caught:
            attach(model, sgd(model), encrypt=key, **settings)
        texts.append(str(caught.value))
    return texts


def test_where_encryption_cannot_be_it_is_refused_and_nothing_is_sent_in_clear(key: str) -> None:
    for first, second in on_processes(2, refused, key):
        assert "need connections of our own" in first and "not encrypted" in second


def test_a_key_is_the_name_of_a_file() -> None:
    with pytest.raises(ConfigError, match="is no name of a file"):
        spardl.SyncConfig(encrypt=True)
