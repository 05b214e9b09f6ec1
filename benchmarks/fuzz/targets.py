"""What is fed: each target has samples that are right, and a way to read bytes that may not be.

Reading must end in the right answer or in an error of our own. Whatever else is raised is a finding; so is a crash, a
wait without end, and an answer that two readers of the same bytes do not agree on.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import pickle
import random
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

from benchmarks.fuzz.mutate import mutated
from spardl.cli.commands import build_parser
from spardl.cli.file import read_options
from spardl.config import SyncConfig
from spardl.errors import ProtocolError, SparDLError
from spardl.kernels import for_device
from spardl.kernels.torch import TorchKernels
from spardl.planning.planfile import PlanFile, digest_of
from spardl.sparse import SparseBlocks
from spardl.sync import state as states
from spardl.sync.plan import Member, plan_model
from spardl.sync.synchronizer import Synchronizer
from spardl.train import checkpoint
from spardl.train.data import cifar, idx, movielens, text
from spardl.transport import ear, quorum, words
from spardl.transport.direct import mesh
from spardl.wire import vector
from spardl.wire.format import VALUE_FORMATS
from spardl.wire.frame import Codec, CodedBlocks

CORPUS = Path(__file__).parent / "corpus"
PEER = 3


class Disagreement(Exception):
    """Two readers have made different things of the same bytes."""


class Target(ABC):
    """One reader.

    weight  how many of 1,000 cases it gets
    text    whether it reads texts
    """

    name: ClassVar[str]
    weight: ClassVar[int] = 10
    text: ClassVar[bool] = False

    def __init__(self) -> None:
        self.right = self.samples()
        self.known = [*self.right, *(path.read_bytes() for path in sorted(CORPUS.glob(f"{self.name}-*")))]

    @abstractmethod
    def samples(self) -> list[bytes]:
        """Bytes that are read without an error. What once was a finding is in the corpus."""

    @abstractmethod
    def read(self, data: bytes, chance: random.Random) -> None:
        """Read them. Raises errors of ours, if anything."""

    def case(self, chance: random.Random) -> bytes:
        """The next bytes to try."""
        return mutated(chance.choice(self.known), self.known, chance, text=self.text)

    def refuses(self, error: BaseException) -> bool:
        """Whether this is how it says no."""
        return isinstance(error, SparDLError)


# --- from the network -------------------------------------------------------------------------------------------------


class Frames(Target):
    """Compiled loops and plain torch read the same frame, of whatever format, for the same blocks."""

    name, weight = "frame", 420

    def samples(self) -> list[bytes]:
        fast, plain = for_device(torch.device("cpu")), TorchKernels()
        self._shapes: list[tuple[Codec, Codec, Any, Any]] = []
        found, random_ = [], np.random.default_rng(0)
        for values in VALUE_FORMATS.values():
            for indices in ("rice", "raw"):
                codec, other = Codec(values, indices, fast), Codec(values, indices, plain)
                for lengths in ([64], [300, 1, 40], [5000]):
                    counts = np.array([max(1, length // 20) for length in lengths])
                    blocks = _blocks(lengths, counts, random_)
                    sizes, budgets = np.array(lengths), np.minimum(counts + 2, lengths)
                    frame = np.asarray(codec.pack(codec.code(blocks), sizes, budgets))
                    found.append(len(self._shapes).to_bytes(2) + frame.tobytes())
                    self._shapes.append((codec, other, sizes, budgets))
        return found

    def read(self, data: bytes, chance: random.Random) -> None:
        which, frame = int.from_bytes(data[:2]), np.frombuffer(data[2:], np.uint8).copy()
        fast, plain, lengths, budgets = self._shapes[which % len(self._shapes)]
        first, second = (_outcome(codec, frame, lengths, budgets) for codec in (fast, plain))
        if first != second:
            raise Disagreement(f"compiled: {str(first)[:200]}; torch: {str(second)[:200]}")
        if isinstance(first, str):
            raise ProtocolError(first, peer=PEER)


def _blocks(lengths: Sequence[int], counts: Any, random_: np.random.Generator) -> SparseBlocks:
    places = [np.sort(random_.choice(n, count, replace=False)) for n, count in zip(lengths, counts, strict=True)]
    where = torch.from_numpy(np.concatenate(places).astype(np.int32))
    values = torch.from_numpy(random_.standard_normal(len(where)).astype(np.float32))
    return SparseBlocks(np.arange(len(lengths)), np.asarray(counts), where, values)


def _outcome(codec: Codec, frame: Any, lengths: Any, budgets: Any) -> Any:
    given = frame if not isinstance(codec.kernels, TorchKernels) else torch.from_numpy(frame.copy())
    try:
        found = codec.unpack(given, np.arange(len(lengths)), lengths, budgets, PEER)
    except ProtocolError as error:
        return str(error)
    return None if found is None else _plain(found, lengths)


def _plain(found: CodedBlocks, lengths: Any) -> tuple[bytes, ...]:
    decoded = found.decode()
    places, values = np.asarray(decoded.indices), np.asarray(decoded.values)
    ends = np.cumsum(found.counts)
    for length, end, count in zip(lengths, ends, found.counts, strict=True):
        mine = places[end - count : end]
        if len(mine) and (mine.min() < 0 or mine.max() >= length or (np.diff(mine) <= 0).any()):
            raise Disagreement(f"indices {mine[:10]} in a block of {length}")
    if not np.isfinite(values).all():
        raise Disagreement("a value that is not finite was taken")
    return np.asarray(found.counts).tobytes(), places.astype(np.int64).tobytes(), values.tobytes()


class Vectors(Target):
    """Values without indices."""

    name, weight = "vector", 190
    formats = tuple(name for name, each in VALUE_FORMATS.items() if each.carries_values)

    def __init__(self) -> None:
        self.kernels = for_device(torch.device("cpu"))
        super().__init__()

    def samples(self) -> list[bytes]:
        values = torch.randn(37, generator=torch.Generator().manual_seed(0))
        coded = [
            bytes([i]) + bytes(vector.pack(values, name, self.kernels)[0].tolist())
            for i, name in enumerate(self.formats)
        ]
        return [*coded, bytes([len(coded)]) + bytes(vector.bare(values).tolist())]

    def read(self, data: bytes, chance: random.Random) -> None:
        which, frame = (data[0] if data else 0) % (len(self.formats) + 1), np.frombuffer(data[1:], np.uint8).copy()
        if which == len(self.formats):
            vector.floats(frame, 37, PEER)
            return
        found = vector.unpack(frame, 37, self.formats[which], self.kernels, PEER)
        if found is not None and not bool(torch.isfinite(found).all()):
            raise Disagreement("a value that is not finite was taken")


class Greetings(Target):
    """Who calls where ranks connect, and who asks where they answer."""

    name, weight = "greeting", 190
    secret = bytes(range(32))

    def samples(self) -> list[bytes]:
        self._ear = ear.Ear(1, secret=self.secret, known=4)
        with mock.patch.object(secrets, "token_bytes", bytes):  # the same cases every time
            question = words.question(self.secret, 2, 1, 0)
            knock = words.knock(self.secret, 1, words.Card(("10.0.0.1", 5), ("10.0.0.1", 6)))
        text = json.dumps({"waits_for": [1], "seconds": 2.0, "blames": None}).encode()
        hello = mesh._HELLO.pack(b"SPDL", mesh.VERSION, 3, bytes(32)) + bytes(32)
        answer = ear._answer(self._ear, question)
        return [b"q" + question, b"q" + knock, b"h" + hello, b"s" + text, b"a" + answer]

    def read(self, data: bytes, chance: random.Random) -> None:
        kind, said = data[:1], data[1:]
        if kind == b"q":
            size = words.size_of(bytearray(said))
            whole = said[:size].ljust(size, b"\0")
            if bool(ear._answer(self._ear, whole)) != (b"q" + whole in self.known):
                raise Disagreement("a question without a proof was answered")
        elif kind == b"h":
            self._greet(said)
        elif kind == b"s":
            words._standing(said, 4)
        else:
            question = self.known[0][1:]
            words.understood(self.secret, question, said, 4)

    def _greet(self, said: bytes) -> None:
        greeting = mesh._greet_as_called(self.secret, 1)
        _, wanted = next(greeting)
        _, proof = greeting.send(said[:wanted].ljust(wanted, b"\0"))
        with contextlib.suppress(StopIteration):
            greeting.send(said[wanted:][:proof].ljust(proof, b"\0"))
            raise Disagreement("a stranger went on")
        raise Disagreement("a stranger was let in")

    def refuses(self, error: BaseException) -> bool:
        return isinstance(error, mesh._Stranger | SparDLError)


class Ballots(Target):
    """What ranks say while they agree on who goes on."""

    name, weight, text = "ballot", 60, True

    def samples(self) -> list[bytes]:
        card = words.Card(("10.0.0.1", 5), ("10.0.0.1", 6))
        proposal = quorum.Proposal(1, (0, 2), (card, card), 7, "k")
        ballots = [quorum.Ballot(0, 7, card, proposal, "k"), quorum.Ballot(0, 7, card, known=3, knocks=(card,))]
        said = {"waits_for": [], "seconds": 0.0, "blames": None, "epoch": 0, "members": [0, 1, 2]}
        return [json.dumps({**said, "ballot": dataclasses.asdict(each)}).encode() for each in ballots]

    def read(self, data: bytes, chance: random.Random) -> None:
        quorum.ballot_of(words._standing(data, 4))


# --- from the disk ----------------------------------------------------------------------------------------------------


class OnDisk(Target):
    """One that reads files: they lie in a folder of this process's own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self.folder = Path(self._folder.name)
        super().__init__()


class Options(OnDisk):
    """`--config FILE`."""

    name, weight, text = "options", 30, True

    def samples(self) -> list[bytes]:
        self._parser = build_parser(("train",))[1]["train"]
        return [
            b'method = "spardl"\ndensity = 0.01\nworkers = 4\nbatch-size = 32\n',
            b'# a run\nupdate = "local"\nevery = 5\ntimeout = 30.0\nteams = 2\ngroups = "model"\nclip-norm = 1.0\n',
        ]

    def read(self, data: bytes, chance: random.Random) -> None:
        path = self.folder / "options.toml"
        path.write_bytes(data)
        read_options(str(path), self._parser)


class Plans(OnDisk):
    """What `spardl plan --out` has written."""

    name, weight, text = "plan", 30, True

    def samples(self) -> list[bytes]:
        settings = {"method": "spardl", "density": 0.01, "teams": 2}
        plan = PlanFile(4, 1000, digest_of({"w": 1000}), "gradients", settings)
        found = []
        for name in ("plan.toml", "plan.json"):
            plan.write(self.folder / name)
            found.append((b"j" if name.endswith("json") else b"t") + (self.folder / name).read_bytes())
        return found

    def read(self, data: bytes, chance: random.Random) -> None:
        path = self.folder / ("plan.json" if data[:1] == b"j" else "plan.toml")
        path.write_bytes(data[1:])
        plan = PlanFile.read(path)
        plan.config()
        plan.check_for(plan.workers, {"w": plan.elements})


class Checkpoints(OnDisk):
    """A checkpoint whose sums were computed anew, so that its content is what has to be checked."""

    name, weight = "checkpoint", 30

    def samples(self) -> list[bytes]:
        self._config = SyncConfig(method="exdyna", density=0.1, dense_below=0)
        members = [Member("w", 60), Member("b", 5)]
        self._plans = plan_model(self._config, members, 2)
        torch.save(states.save(self._synchronizer()), self.folder / "rank-00000.pt")
        state = (self.folder / "rank-00000.pt").read_bytes()
        (self.folder / "common.pt").write_bytes(b"x")
        meta = {"format": 1, "step": 3, "identity": {}, "history": [], "files": {"common.pt": {"size": 1}}}
        return [b"s" + state, b"m" + json.dumps(meta).encode()]

    def _synchronizer(self) -> Synchronizer:
        sync = Synchronizer(0, 2, kernels=for_device(torch.device("cpu")))
        sync.regroup(self._plans)
        return sync

    def read(self, data: bytes, chance: random.Random) -> None:
        if data[:1] == b"m":
            (self.folder / checkpoint.META).write_bytes(data[1:])
            checkpoint.check_files(self.folder, checkpoint.read_meta(self.folder)["files"])
            return
        path = self.folder / "rank-00000.pt"
        path.write_bytes(data[1:])
        facts = {"size": len(data) - 1, "sha256": hashlib.sha256(data[1:]).hexdigest()}
        state = checkpoint.read_state(self.folder, path.name, {path.name: facts})
        states.load(self._synchronizer(), self._config, state, regroup=False)


class DataFiles(OnDisk):
    """Data sets in the formats of their publishers."""

    name, weight = "data", 40

    def samples(self) -> list[bytes]:
        chance = random.Random(0)
        images = bytes((0, 0, 8, 3)) + (2).to_bytes(4) + (28).to_bytes(4) + (28).to_bytes(4) + chance.randbytes(1568)
        ratings = b"userId,movieId,rating,timestamp\n1,2,3.0,964982703\n1,3,4.0,964981247\n2,3,1.5,964982224\n"
        table = {"data": np.zeros((1, 3072), np.uint8), "labels": [1], "filenames": ["a"]}
        return [
            b"i" + images,
            b"z" + gzip.compress(images, mtime=0),
            b"c" + bytes([3]) + chance.randbytes(3072),
            b"p" + pickle.dumps(table, protocol=2),
            b"r" + ratings,
            b"w" + b" the cat sat \n on the mat <unk> \n",
        ]

    def read(self, data: bytes, chance: random.Random) -> None:
        kind, path = data[:1], self.folder / ("data.gz" if data[:1] == b"z" else "data")
        path.write_bytes(data[1:])
        if kind in (b"i", b"z"):
            idx._read_idx(path, 3)
        elif kind == b"c":
            cifar._read_binary(1)(path, 10)
        elif kind == b"p":
            cifar._read_python("labels")(path, 10)
        elif kind == b"r":
            movielens._read(path, movielens.Format("ratings.csv", ",", movielens.CSV_HEADER, 3))
        else:
            text.read_words(path)


TARGETS: tuple[type[Target], ...] = (Frames, Vectors, Greetings, Ballots, Options, Plans, Checkpoints, DataFiles)
