"""What transports say when something goes wrong: who, where, and what to do now. One sentence, the same on every one.

`who` is a rank with the place where it runs, and `where` a round with its name; `named` and `place` make them.
"""

from collections.abc import Callable

from spardl.errors import PeerError, ProtocolError, StateError
from spardl.metrics import Traffic
from spardl.transport.inquiry import Verdict

INTACT = "Residuals are intact; resume from the last checkpoint."


def named(peer: int, address: str) -> str:
    """A rank as people find it: with the host, or the MPI rank, that it is."""
    return f"rank {peer} ({address})"


def place(traffic: Traffic, name: str) -> str:
    """The round under way: the first that has not been counted yet."""
    return f"round {traffic.rounds + 1}, {name}"


def missing(peer: int, who: str, did: str, where: str) -> PeerError:
    """A peer that closed its line or moves nothing. `did` follows its name: "sent nothing for 30 s"."""
    return PeerError(f"{who} {did} in {where}; its process may be gone. {INTACT}", peer=peer)


def judged(verdict: Verdict, rank: int, who: Callable[[int], str], did: str, where: str) -> PeerError:
    """What an inquiry has found. `did` is what the rank that was waited for has done: "sent nothing for 30 s"."""
    ranks = tuple(verdict.faults)
    if not ranks:
        text = f"rank {rank} waited in vain in {where} ({did}); who failed it cannot be known"
        names = ", ".join(map(str, verdict.chain))
        text += f": ranks {names} answer, and wait for others. {INTACT}"
        return PeerError(text, candidates=verdict.chain)
    why = ", ".join(f"{'it' if len(ranks) == 1 else f'rank {peer}'} {words}" for peer, words in verdict.faults.items())
    if ranks == (rank,):
        return PeerError(f"rank {rank}, this one, has failed the others in {where}: {why}. {INTACT}", peer=rank)
    names = " and ".join(map(who, ranks))
    if verdict.victim is not None:
        did = f"has failed rank {verdict.victim}, which waited for it, and so this one,"
    return PeerError(f"{names} {did} in {where}; {why}. {INTACT}", peer=ranks[0], candidates=ranks)


def silent(peer: int, who: str, verb: str, seconds: float, where: str) -> PeerError:
    """A peer that "sent" or "took" nothing for the whole timeout."""
    return missing(peer, who, f"{verb} nothing for {seconds:g} s", where)


def broken(peer: int, who: str, where: str, reason: str) -> PeerError:
    """A message to or from this peer has failed, as the library that moves it says."""
    return PeerError(f"{who} broke off in {where}: {reason}. {INTACT}", peer=peer)


def dragged(peer: int, who: str, victim: int, where: str) -> PeerError:
    """`victim` has left because of this peer, and said so."""
    return PeerError(f"{who} has failed rank {victim}, which left before the end of {where}. {INTACT}", peer=peer)


def collective(verdict: Verdict, rank: int, who: Callable[[int], str], name: str, why: str) -> PeerError:
    """What an inquiry has found about a collective that has failed, for which the library says `why`."""
    if not verdict.faults or rank in verdict.faults:
        return judged(verdict, rank, who, "it failed", f"{name} ({why})")
    ranks = tuple(verdict.faults)
    found = " and ".join(f"{who(peer)} {words}" for peer, words in verdict.faults.items())
    return PeerError(f"{name} failed: {found}. {INTACT}", peer=ranks[0], candidates=ranks)


def unexpected(peer: int, who: str, sent: str, where: str) -> ProtocolError:
    """A peer that sent what this round does not expect. `sent` follows its name."""
    return ProtocolError(f"{who} {sent} in {where}; all ranks must run the same program.", peer=peer)


def oversized(peer: int, who: str, capacity: int, rank: int, where: str) -> ProtocolError:
    """A peer that sent more than this rank has room for."""
    return ProtocolError(f"{who} sent more than the {capacity} bytes that rank {rank} expected in {where}.", peer=peer)


def unlike(peer: int, who: str, sent: str) -> ProtocolError:
    """A peer that reduces another tensor than this rank does."""
    return ProtocolError(f"{who} sent {sent}; all ranks must reduce tensors of one shape.", peer=peer)


def unlike_entries(peer: int, who: str, name: str, rank: int) -> ProtocolError:
    """A peer that reduces another sparse tensor than this rank does."""
    return unlike(peer, who, f"entries in {name} that do not fit the tensor of rank {rank}")


def closed() -> StateError:
    """An operation after `close`."""
    return StateError("this transport was closed; make another one.")


def first_line(error: BaseException) -> str:
    """What a library says about its error, to be put into a sentence of ours."""
    return reason(str(error)) or type(error).__name__


def reason(text: str) -> str:
    """The first line of a text, without its full stop."""
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else ""
