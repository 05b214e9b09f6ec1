"""Words: what ranks say to each other beside the exchange, when something is the matter or somebody wants to come.

A question is one message and an answer another, each with a proof that its sender knows the secret of the run; whoever
cannot prove that is hung up on. Here are the bytes alone: `ear.py` hears them, `watch.py` says them.

    question  "SPDW", version (u32), who asks (u32), who is asked (u32), because of whom it leaves (i32; -1 if it does
              not), 32 random bytes; then HMAC-SHA256(secret, "question", all of that)          little-endian
    knock     "SPDJ", version (u32), who is asked (u32), 256 bytes of JSON: where the newcomer listens, 32 random bytes;
              then HMAC-SHA256(secret, "knock", all of that). It is answered like a question
    answer    length of a text (u32); the text, which is JSON; HMAC-SHA256(secret, "answer", the random bytes, the text)
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from spardl.choices import is_count

VERSION = 1
LONGEST_ANSWER = 1 << 16
NOBODY = -1  # the number of a newcomer that has none yet

_MAGIC = b"SPDW"
_QUESTION = struct.Struct("<4sIIIi32s")
_KNOCK_MAGIC = b"SPDJ"
_KNOCK = struct.Struct("<4sII256s32s")
_NONCE = 32
_LENGTH = struct.Struct("<I")
_PROOF = 32
LONGEST = _LENGTH.size + LONGEST_ANSWER + _PROOF


class Silence(Enum):
    """Why a rank has not answered."""

    GONE = "is gone"  # nobody listens there, or hung up
    MUTE = "does not answer"  # somebody listens and says nothing: stopped, or hanging
    UNREACHABLE = "cannot be reached"  # nothing comes back at all
    UNKNOWN = "cannot be asked"  # it listens nowhere


@dataclass(frozen=True)
class Standing:
    """What a rank says of itself: for whom it has waited for how long, or because of whom it has left.

    One that waits for nobody computes, or is somewhere else in its program. `epoch` and `members` are those of the
    community that it belongs to, and `ballot` is what it says while one is formed anew (`quorum.py`).
    """

    waits_for: tuple[int, ...] = ()
    seconds: float = 0.0
    blames: int | None = None
    epoch: int = field(default=0, compare=False)
    members: tuple[int, ...] = field(default=(), compare=False)
    ballot: Mapping[str, Any] | None = field(default=None, compare=False)


Answer = Standing | Silence
Place = tuple[str, int]


@dataclass(frozen=True)
class Card:
    """Where a rank, or a newcomer, can be reached: by questions, and by the connections of those that go on."""

    watch: Place
    mesh: Place

    @classmethod
    def of(cls, said: Any) -> "Card":
        """What was said, if it can be understood. Raises `ValueError`, `TypeError` or `KeyError` if not."""
        return cls(_place(said["watch"]), _place(said["mesh"]))


def _place(said: Any) -> Place:
    host, port = said
    if not isinstance(host, str) or not is_count(port) or port > 0xFFFF:
        raise ValueError("this is no place")
    return host, port


def question(secret: bytes, me: int, peer: int, blamed: int) -> bytes:
    words = _QUESTION.pack(_MAGIC, VERSION, me, peer, blamed, secrets.token_bytes(32))
    return words + hmac.digest(secret, b"question" + words, hashlib.sha256)


def knock(secret: bytes, peer: int, card: Card) -> bytes:
    text = json.dumps(asdict(card)).encode().ljust(256)
    words = _KNOCK.pack(_KNOCK_MAGIC, VERSION, peer, text, secrets.token_bytes(_NONCE))
    return words + hmac.digest(secret, b"knock" + words, hashlib.sha256)


@dataclass(frozen=True)
class Question:
    """Who asks whom, and because of whom it leaves; -1 if it does not."""

    caller: int
    called: int
    blamed: int


@dataclass(frozen=True)
class Knock:
    """A newcomer that asks a member to be let in."""

    called: int
    card: Card


def size_of(heard: bytes | bytearray) -> int:
    """How long what a caller says is to be, by its first bytes."""
    return (_KNOCK if heard[:4] == _KNOCK_MAGIC else _QUESTION).size + _PROOF


def heard_from(secret: bytes, said: bytes) -> Question | Knock | None:
    """What a caller has said; None if it cannot prove that it knows the secret, or cannot be understood."""
    words, proof = said[:-_PROOF], said[-_PROOF:]
    knocks = said[:4] == _KNOCK_MAGIC
    role = b"knock" if knocks else b"question"
    if not hmac.compare_digest(proof, hmac.digest(secret, role + words, hashlib.sha256)):
        return None
    if knocks:
        _, version, called, text, _ = _KNOCK.unpack(words)
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            return Knock(called, Card.of(json.loads(text))) if version == VERSION else None
        return None
    magic, version, caller, called, blamed, _ = _QUESTION.unpack(words)
    return Question(caller, called, blamed) if (magic, version) == (_MAGIC, VERSION) else None


def answer(secret: bytes, said: bytes, standing: Standing) -> bytes:
    """What whoever has said that is told."""
    text = json.dumps(asdict(standing)).encode()
    return _LENGTH.pack(len(text)) + text + hmac.digest(secret, b"answer" + _nonce(said) + text, hashlib.sha256)


def understood(secret: bytes, question: bytes, heard: bytes, known: int) -> Answer | None:
    """The answer in these bytes; None while it is not complete. Whoever cannot prove itself has not answered."""
    if len(heard) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(heard)
    if size > LONGEST_ANSWER:
        return Silence.MUTE
    text, proof = heard[_LENGTH.size :][:size], heard[_LENGTH.size + size :]
    if len(proof) < _PROOF:
        return None
    if not hmac.compare_digest(proof, hmac.digest(secret, b"answer" + _nonce(question) + text, hashlib.sha256)):
        return Silence.MUTE
    return _standing(text, known)


def _standing(text: bytes, known: int) -> Answer:
    """A member has written this, but may be another version, or mistaken."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        said = json.loads(text)
        waits, seconds, blames = said["waits_for"], said["seconds"], said["blames"]
        epoch, members, ballot = said.get("epoch", 0), said.get("members", []), said.get("ballot")
        numbers = [*waits, *([] if blames is None else [blames])]
        fits = all(is_count(number) and number < known for number in numbers) and isinstance(seconds, float)
        belongs = is_count(epoch) and all(map(is_count, members)) and (ballot is None or isinstance(ballot, dict))
        if fits and belongs:
            return Standing(tuple(waits), seconds, blames, epoch, tuple(members), ballot)
    return Standing()


def in_ranks(answer: Answer, ranks: Mapping[int, int]) -> Answer:
    """An answer with the ranks that members have now; who is none is not spoken of."""
    if not isinstance(answer, Standing):
        return answer
    waits = tuple(ranks[number] for number in answer.waits_for if number in ranks)
    return replace(answer, waits_for=waits, blames=ranks.get(answer.blames) if answer.blames is not None else None)


def _nonce(question: bytes) -> bytes:
    """The random bytes, which stand before the proof."""
    return question[-_NONCE - _PROOF : -_PROOF]
