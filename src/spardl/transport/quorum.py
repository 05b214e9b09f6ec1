"""Who goes on when ranks are lost: those that remain agree on who they are, through their watches.

A rank that has lost a peer publishes a *ballot* and looks at everybody else's, again and again. When nobody is left to
be waited for, the lowest rank proposes a community, all that are in it accept, and it is decided. Nothing but the ranks
themselves is needed: no store, and no rank that must not be lost.

Steps are concluded on all ranks or on none (`Worker.together`): one that counts on any rank that remains was complete
on all of them, so the most that any of them has concluded is what all of them conclude. A decision that comes to
nothing, because another rank was lost meanwhile, has changed nothing, and there is another one.

Ranks go by the numbers that they had when they came. In the same way newcomers are let in, between two steps, when all
members have come together for that (`open`): whoever has knocked at any of them is given the next number.
"""

import dataclasses
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spardl.choices import is_count
from spardl.errors import LeftBehind, PeerError
from spardl.transport.watch import Watch
from spardl.transport.words import Answer, Card, Place, Silence, Standing

SILENCE_S = 10.0  # after which a rank that says nothing is left behind, if the timeout is not shorter
HEARD_S = 1.0  # for ranks that come in time to hear that one was given up on which did not
GRACE_S = 30.0  # beyond the timeout, for all to accept
NAP_S = 0.02

GUEST_S = 5.0  # that a newcomer has to accept; beyond, it is not waited for


@dataclass(frozen=True)
class Proposal:
    """A community.

    epoch      how many there were before it
    members    in rank order
    cards      where each of them can be reached
    concluded  the steps that count on all of them
    key        of this proposal alone
    decided    all have accepted it
    """

    epoch: int
    members: tuple[int, ...]
    cards: tuple[Card, ...]
    concluded: int
    key: str
    decided: bool = False


@dataclass(frozen=True)
class Ballot:
    """What a rank says that goes on: the epoch it comes from, what it has concluded, where it can be reached, what it
    proposes (as the lowest), which proposal it has accepted; whether newcomers can be let in, how many numbers were
    given out, and who has knocked."""

    epoch: int
    concluded: int
    card: Card
    proposal: Proposal | None = None
    accepted: str = ""
    open: bool = False
    known: int = 0
    knocks: tuple[Card, ...] = ()


def agree(
    watch: Watch,
    place: Place,
    concluded: int,
    *,
    timeout: float,
    patience: float | None = None,
    guests: bool = False,
) -> Proposal:
    """What those that remain have decided. `place` is where this rank listens for the others.

    Takes a few tens of milliseconds if all others are there or gone for certain. Whoever is there is waited for until
    the timeout, whoever is silent for `SILENCE_S` at the most. With `patience`, whoever has given up on somebody itself
    is waited for for so long, and whoever has not for `HEARD_S`: it is the one that was waited for in vain. `guests`:
    between two steps, when newcomers can be let in.

    Raises:
        LeftBehind: the others have gone on without this rank.
        PeerError: too few are left to be sure that they are not the ones that were cut off.
    """
    knocks = tuple(watch.knocks) if guests else ()
    ballot = Ballot(watch.epoch, concluded, Card(watch.place, place), open=guests, known=watch.known, knocks=knocks)
    council = _Council(watch, ballot, timeout, patience)
    deadline = time.monotonic() + timeout + GRACE_S
    while time.monotonic() < deadline:
        decided = council.look()
        if decided is not None:
            return decided
        time.sleep(NAP_S)
    raise PeerError(f"the ranks that are left did not agree on who they are for {timeout + GRACE_S:g} s.")


def be_let_in(watch: Watch, card: Card, *, timeout: float) -> Proposal:
    """Knock at the members that this newcomer's watch knows, until they have decided on a community with it in.

    Raises:
        PeerError: nobody has let it in.
    """
    deadline, members = time.monotonic() + timeout, list(range(watch.known))
    while time.monotonic() < deadline:
        ballots = [ballot_of(each) for each in watch.knock(members, card).values()]
        offers = [each.proposal for each in ballots if each is not None and each.proposal is not None]
        for offer in offers:
            if card in offer.cards:
                watch.number_as(offer.members[offer.cards.index(card)])
                mine = Ballot(offer.epoch - 1, offer.concluded, card, accepted=offer.key)
                watch.ballot = dataclasses.asdict(mine)
                if offer.decided:
                    return offer
        time.sleep(NAP_S)
    raise PeerError(
        f"nobody let this newcomer in for {timeout:g} s: members are let in between two exchanges, if the invitation is"
        " of a run that still goes on."
    )


class _Council:
    """One rank's part in it."""

    def __init__(self, watch: Watch, ballot: Ballot, timeout: float, patience: float | None = None) -> None:
        self._watch = watch
        self._timeout, self._patience = timeout, patience
        self._began = time.monotonic()
        self._others = [number for number in watch.members if number != watch.number]
        self._silent: dict[int, Answer] = {}  # ranks that are waited for no more: to ask them again takes a second each
        self._guests: dict[int, Card] = {}
        self._proposed = self._began
        self._publish(ballot)

    def look(self) -> Proposal | None:
        """Ask all others, and answer to what they say; what was decided, once it is."""
        asked = self._watch.survey(number for number in self._others if number not in self._silent)
        answers = asked | self._silent
        self._silent |= {
            number: each
            for number, each in asked.items()
            if isinstance(each, Silence) and not self._is_waited_for(number, each)
        }
        self._check_that_we_belong(answers)
        ballots = {number: ballot for number, each in answers.items() if (ballot := ballot_of(each)) is not None}
        offers = [(number, each.proposal) for number, each in ballots.items() if each.proposal is not None]
        ours = [(number, offer) for number, offer in offers if self._is_meant(offer)]
        if min([*ballots, self._watch.number]) < self._watch.number:
            return self._follow(min(ours)[1]) if ours else None
        if any(self._is_waited_for(number, each) for number, each in answers.items()):
            return None
        return self._lead(answers, ballots)

    def _is_meant(self, offer: Proposal) -> bool:
        """Whether a proposal is for this rank as it is now: one of an earlier attempt has another place for it."""
        return (self._watch.number, self._ballot.card) in zip(offer.members, offer.cards, strict=True)

    def _follow(self, proposal: Proposal) -> Proposal | None:
        if self._ballot.accepted != proposal.key:
            self._publish(dataclasses.replace(self._ballot, accepted=proposal.key, proposal=None))
        return proposal if proposal.decided else None

    def _lead(self, answers: Mapping[int, Answer], ballots: Mapping[int, Ballot]) -> Proposal | None:
        self._check_that_we_are_enough(answers, ballots)
        here = tuple(sorted([*ballots, self._watch.number]))
        mine = self._ballot.proposal
        if mine is None:
            self._guests = self._newcomers(ballots)
        elif self._guests and time.monotonic() - self._proposed > GUEST_S:
            self._guests = {}
        wanted = self._proposal((*here, *self._guests), ballots)
        if mine is None or (mine.members, mine.cards) != (wanted.members, wanted.cards):
            self._publish(dataclasses.replace(self._ballot, proposal=wanted))
            self._proposed = time.monotonic()
            return None
        guests = {number: ballot_of(each) for number, each in self._watch.survey(self._guests).items()}
        if all(each is not None and each.accepted == mine.key for each in (*ballots.values(), *guests.values())):
            decided = dataclasses.replace(mine, decided=True)
            self._publish(dataclasses.replace(self._ballot, proposal=decided))
            return decided
        return None

    def _newcomers(self, ballots: Mapping[int, Ballot]) -> dict[int, Card]:
        """Who has knocked at any of us, with the numbers that they get; nobody, unless all are ready for that."""
        everyone = [*ballots.values(), self._ballot]
        if not all(each.open for each in everyone):
            return {}
        knocks = dict.fromkeys(card for each in everyone for card in each.knocks)
        first = max(each.known for each in everyone)
        for number, card in enumerate(knocks, first):
            self._watch.expect(number, card.watch)
        return dict(enumerate(knocks, first))

    def _proposal(self, members: tuple[int, ...], ballots: Mapping[int, Ballot]) -> Proposal:
        everyone = {**ballots, self._watch.number: self._ballot}
        cards = {**{number: each.card for number, each in everyone.items()}, **self._guests}
        epoch = 1 + max(each.epoch for each in everyone.values())
        concluded = max(each.concluded for each in everyone.values())
        return Proposal(epoch, members, tuple(cards[each] for each in members), concluded, secrets.token_hex(16))

    def _publish(self, ballot: Ballot) -> None:
        self._ballot = ballot
        self._watch.ballot = dataclasses.asdict(ballot)

    def _is_waited_for(self, number: int, answer: Answer) -> bool:
        """Whether a rank may still come: it has only just fallen silent, or computes."""
        if answer is Silence.GONE or ballot_of(answer) is not None or _has_failed(number, answer):
            return False
        return time.monotonic() - self._began < self._time_for(answer)

    def _time_for(self, answer: Answer) -> float:
        """Seconds that a rank is waited for which has given this answer."""
        if self._patience is not None:
            comes = isinstance(answer, Standing) and answer.blames is not None
            return min(self._timeout, self._patience if comes else HEARD_S)
        return self._timeout if isinstance(answer, Standing) else min(self._timeout, SILENCE_S)

    def _check_that_we_belong(self, answers: Mapping[int, Answer]) -> None:
        for number, each in answers.items():
            if not isinstance(each, Standing) or each.epoch <= self._watch.epoch:
                continue
            if self._watch.number not in each.members:
                text = f"rank {self._watch.rank}, this one, was given up on: rank {number} and others go on"
                raise LeftBehind(f"{text} without it.", peer=self._watch.rank)

    def _check_that_we_are_enough(self, answers: Mapping[int, Answer], ballots: Mapping[int, Ballot]) -> None:
        """Ranks of which nobody can tell whether they are dead or cut off might go on as well: the half that is larger,
        or has the lowest rank, does."""
        unsure = [number for number, each in answers.items() if isinstance(each, Silence) and each is not Silence.GONE]
        here = [*ballots, self._watch.number]
        if unsure and (len(here), -min(here)) < (len(unsure), -min(unsure)):
            ranks = tuple(self._watch.members.index(number) for number in unsure)
            names = ", ".join(map(str, ranks))
            raise PeerError(
                f"rank {self._watch.rank} cannot reach ranks {names}, which may go on without it: they are as many as"
                " those that are left here, or more. Resume from the last checkpoint.",
                candidates=ranks,
            )


def _has_failed(number: int, answer: Answer) -> bool:
    """Whether a rank blames itself: it has failed, and will not come."""
    return isinstance(answer, Standing) and answer.blames == number and answer.ballot is None


def ballot_of(answer: Answer) -> Ballot | None:
    """What a rank that goes on has said, if it can be understood."""
    if not isinstance(answer, Standing) or answer.ballot is None:
        return None
    try:
        said = dict(answer.ballot)
        offer = said["proposal"]
        ballot = Ballot(
            epoch=said["epoch"],
            concluded=said["concluded"],
            card=Card.of(said["card"]),
            proposal=None if offer is None else _proposal_of(offer),
            accepted=str(said["accepted"]),
            open=said["open"] is True,
            known=said["known"],
            knocks=tuple(map(Card.of, said["knocks"])),
        )
        return ballot if all(map(is_count, (ballot.epoch, ballot.concluded, ballot.known))) else None
    except (KeyError, TypeError, ValueError):
        return None


def _proposal_of(said: Mapping[str, Any]) -> Proposal:
    members = tuple(said["members"])
    cards = tuple(map(Card.of, said["cards"]))
    numbers = (said["epoch"], said["concluded"], *members)
    if len(members) != len(cards) or not all(map(is_count, numbers)) or list(members) != sorted(set(members)):
        raise ValueError("this is no community")
    return Proposal(said["epoch"], members, cards, said["concluded"], str(said["key"]), decided=said["decided"] is True)
