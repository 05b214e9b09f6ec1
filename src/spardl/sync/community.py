"""Sessions whose ranks may change: those that are left go on when some are lost, and newcomers join between steps."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError, LeftBehind
from spardl.metrics import Change
from spardl.sync.plan import Member, plan_model
from spardl.sync.session import Session
from spardl.transport.direct import DirectTransport
from spardl.transport.direct.secure import Key
from spardl.transport.invitation import Invitation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Company:
    """The ranks that take part now.

    rank, workers  this one's number among them, and how many they are: to deal data by
    members        the numbers that they had when they came, in rank order
    invitation     with this text a newcomer joins them: `attach(..., invitation=text)`. Keep it like a password. Empty
                   where nobody can join
    """

    rank: int
    workers: int
    members: tuple[int, ...]
    invitation: str = ""


def company_of(session: Session) -> Company:
    """Those of a session."""
    transport = session.transport
    if not (isinstance(transport, DirectTransport) and session.worker.votes):
        return Company(transport.rank, transport.workers, tuple(range(transport.workers)))
    watch = transport.watch
    return Company(transport.rank, transport.workers, watch.members, str(Invitation(watch.secret, watch.places)))


def together(session: Session, prepare: Callable[[], Callable[[], bool]]) -> bool:
    """Do something on all ranks or on none, and wait: what `prepare`, which may send, returns to be done."""
    return session.worker.run(lambda: session.worker.together(prepare())).result()


def join(members: Sequence[Member], config: SyncConfig, invitation: Invitation, *, of_weights: bool) -> Session:
    """Join a run that goes on, between two of its steps, as one rank more. What it has done so far is to be loaded.

    Raises:
        PeerError: nobody has let this process in.
    """
    key = None if config.encrypt is None else Key(config.encrypt)
    transport, found = DirectTransport.joining(invitation.secret, invitation.places, timeout=config.timeout, key=key)
    fits = fitting(config, transport.workers)
    session = Session(transport, fits, plan_model(fits, members, transport.workers), of_weights=of_weights, lasts=True)
    session.worker.concluded = found.concluded
    return session


def go_on(session: Session, settle: Callable[[Any], None] = lambda _: None, *, guests: bool = False) -> bool:
    """Go on with the ranks that are left, after one was lost. Collective among them. With `guests`, nobody was lost,
    nothing is under way, and whoever has knocked is let in.

    The step that was under way counts on all of them or on none. Residuals stay; groups are planned for as many workers
    as there are, and controllers start anew.

    Args:
        settle: called with what the step came to, if it counts, before groups change.

    Returns:
        Whether the step that was under way on this rank counts; if not, it is to be made again.

    Raises:
        LeftBehind: this rank is not among them; it may come back (`come_back`).
        PeerError: too few are left.
    """
    started = time.perf_counter()
    session.wait()
    assert isinstance(session.transport, DirectTransport)
    before = session.transport.watch.members
    try:
        transport, found = session.transport.reformed(session.worker.concluded, guests=guests)
    except LeftBehind:
        raise
    except BaseException:
        session.worker.abandon()
        raise
    result = session.worker.go_on(transport, found.concluded)
    if result is not None:
        settle(result)
    _form_anew(session, transport)
    left = tuple(sorted(set(before) - set(found.members)))
    session.departed |= dict.fromkeys(left, found.concluded)
    joined = tuple(sorted(set(found.members) - set(before)))
    seconds = time.perf_counter() - started
    session.changes.append(Change(found.epoch, session.sync.steps, found.members, left, joined, seconds))
    logger.warning("%s", told(session.changes[-1], transport.rank))
    return result is not None


@dataclass(frozen=True)
class Return:
    """What a rank has found that comes back: how many steps count there, and the number that it had before."""

    concluded: int
    number: int


def come_back(session: Session) -> Return:
    """Join those that have gone on without this rank, between two of their steps, as a newcomer does. What was under
    way here waits for `settle_return`, since the others know whether it counts.

    Raises:
        PeerError: nobody has let this rank in.
    """
    assert isinstance(session.transport, DirectTransport)
    number = session.transport.watch.number
    transport, found = session.transport.returning()
    session.transport = transport
    return Return(found.concluded, number)


def settle_return(session: Session, back: Return, steps: int, settle: Callable[[Any], None]) -> None:
    """Take part from now on, after `steps` steps. `settle`: called with what the step came to that was under way when
    this rank was left behind, if that counts."""
    transport = session.transport
    assert isinstance(transport, DirectTransport)
    counts = session.departed.get(back.number, 0) > session.worker.concluded
    result = session.worker.come_back(transport, counts=counts, concluded=back.concluded)
    if result is not None:
        settle(result)
    _form_anew(session, transport)
    session.sync.steps = steps
    logger.warning("rank %d was left behind, and is rank %d now", back.number, session.transport.rank)


def _form_anew(session: Session, transport: DirectTransport) -> None:
    """Arrange groups for the ranks that this transport connects."""
    session.transport, session.compared = transport, False
    session.config = fitting(session.config, transport.workers)
    members = [member for plan in session.plan for member in plan.members]
    plans = plan_model(session.config, members, transport.workers)
    session.sync.regroup(plans, place=(transport.rank, transport.workers))


def fitting(config: SyncConfig, workers: int) -> SyncConfig:
    """The same settings for so many workers; teams that these cannot form are formed anew."""
    try:
        config.check_for(workers)
    except ConfigError:
        if not hasattr(config.options, "teams"):
            raise
        return configure(config, {"teams": "auto"})
    return config


def told(change: Change, rank: int) -> str:
    """What people read when ranks have left or come."""
    moves = [(change.left, "left"), (change.joined, "came")]
    who = [f"{', '.join(map(str, ranks))} {verb}" for ranks, verb in moves if ranks] or ["nobody left"]
    here = ", ".join(map(str, change.members))
    text = f"before exchange {change.step}, of the ranks that began: {'; '.join(who)}; {here} go on, and this one is"
    return f"{text} rank {rank} of {len(change.members)} now ({change.seconds:.1f} s)"
