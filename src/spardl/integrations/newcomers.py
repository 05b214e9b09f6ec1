"""What newcomers get from those that were there before: weights, optimizers, and where the run is."""

import contextlib
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spardl.collectives.program import Message, Round
from spardl.errors import ConfigMismatch, PeerError
from spardl.sync.community import company_of, go_on

if TYPE_CHECKING:
    from spardl.integrations.local import LocalSync
    from spardl.sync.session import Session


def let_in(session: "Session") -> list[int]:
    """Form the community anew, with whoever has knocked; which ranks are new. Collective, between two exchanges."""
    before = company_of(session).members
    go_on(session, guests=True)
    return [rank for rank, number in enumerate(company_of(session).members) if number not in before]


def hand_over(sync: "LocalSync", newcomers: list[int], *, due: bool) -> None:
    """Send these ranks what this one would save, if it is the one to do that. `due`: an exchange begins right after."""
    transport = sync.session.transport
    if transport.rank or not newcomers:
        return
    file = io.BytesIO()
    departed = dict(sync.session.departed)
    torch.save({"facts": json.dumps(sync.facts), "due": due, "departed": departed, "state": sync.state_dict()}, file)
    blob = np.frombuffer(file.getbuffer(), np.uint8)
    size = np.array([blob.size], np.int64).view(np.uint8)
    with contextlib.suppress(PeerError):  # who is gone again already is missed at the next exchange
        for name, frame in (("size of a state", size), ("a state", blob)):
            transport.perform(Round([Message(rank, frame, frame.size) for rank in newcomers], [], name))


def take_over(sync: "LocalSync") -> bool:
    """As a newcomer: begin where rank 0 is, at the shared weights; whether an exchange is due at once.

    Raises:
        ConfigMismatch: this rank's settings or model are not the run's.
    """
    transport, given = sync.session.transport, receive(sync.session)
    check_facts(json.loads(given["facts"]), json.loads(json.dumps(sync.facts)), transport.rank)
    state, local = given["state"], given["state"]["local"]
    residuals = {name: torch.zeros_like(each) for name, each in state["residuals"].items()}
    state |= {"rank": transport.rank, "workers": transport.workers, "residuals": residuals, "methods": []}
    local |= {"own": {name: each.clone() for name, each in local["shared"].items()}, "landings": {}, "offered": None}
    sync.load_state_dict(state)
    return bool(given["due"])


def receive(session: "Session") -> dict[str, Any]:
    """What rank 0 hands over to a newcomer."""
    transport = session.transport
    (size,) = transport.perform(Round([], [(0, 8)], "size of a state"))
    (blob,) = transport.perform(Round([], [(0, int(size.view(np.int64)[0]))], "a state"))
    given: dict[str, Any] = torch.load(io.BytesIO(blob.tobytes()), weights_only=True)
    session.departed = given["departed"]
    return given


def check_facts(theirs: dict[str, Any], mine: dict[str, Any], rank: int) -> None:
    """Raise `ConfigMismatch` if a newcomer has other settings, or another model, than the run that it joins."""
    for key in sorted(set(theirs) | set(mine)):
        if theirs.get(key) != mine.get(key):
            raise ConfigMismatch(
                f"this newcomer and the run differ in {key}: {theirs.get(key)!r} there and {mine.get(key)!r} here; join"
                " with the same settings and the same model.",
                ranks=(0, rank),
            )
