"""Who is to blame when a rank has waited in vain: the ranks are asked whom they wait for, and the chain is followed.

What counts, in this order: this rank itself was away, or others have given up on it (if it was away before, and finds
somebody gone, that one has, though nobody could tell it); a rank that has left has said
because of whom; a rank is gone, does not answer or cannot be reached; a rank is there, but came late or is elsewhere in
its program. Where all wait for each other nobody can tell, and that is what is said.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spardl.transport.watch import Watch
from spardl.transport.words import Answer, Silence, Standing

MOST = 256  # ranks that one rank asks
MOSTLY = 0.9  # of the timeout: whoever was away for so long is the one that others gave up on
LONG = 0.5  # of the timeout: who has waited for less has come late itself


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, and for each what is the matter with it: words that follow its name.

    faults  several where it cannot be told which it was; none where nobody can tell
    victim  who had to wait for them, or left because of them; None if it is this rank
    chain   all that may have been, where nobody can tell
    """

    faults: Mapping[int, str]
    victim: int | None = None
    chain: tuple[int, ...] = ()


WORDS = {
    Silence.GONE: "is gone",
    Silence.MUTE: "does not answer: its process is stopped or hangs",
    Silence.UNREACHABLE: "cannot be reached: its host or its line is down",
}
LATE = "answers, but came late or is elsewhere in its program"
CUT_OFF = "reaches none of the other ranks, and is cut off from the network"


def inquire(watch: Watch, suspects: Collection[int], workers: int, *, since: float, timeout: float) -> Verdict:
    """Ask around. `suspects` are those that this rank has waited for since `since`. Takes up to `ANSWER_S` seconds."""
    away = watch.away(since)
    if away >= MOSTLY * timeout:
        return Verdict({watch.rank: f"did not run for {away:.0f} s: stopped, or asleep"})
    others = [peer for peer in range(workers) if peer not in (watch.rank, *suspects)]
    answers, told = watch.ask([*suspects, *others][:MOST]), watch.told()
    before = watch.away(watch.rested)
    if before >= MOSTLY * timeout and not told and Silence.GONE in answers.values():
        return Verdict({watch.rank: f"did not run for {before:.0f} s before: stopped, or asleep"})
    return judge(watch.rank, suspects, answers, told, timeout)


def judge(
    rank: int, suspects: Collection[int], answers: Mapping[int, Answer], told: Mapping[int, int], timeout: float
) -> Verdict:
    """The verdict on these answers."""
    left = {**{peer: each.blames for peer, each in answers.items() if isinstance(each, Standing)}, **told}
    blamed = [(peer, culprit) for peer, culprit in left.items() if culprit is not None]
    if culprits := [peer for peer, culprit in blamed if culprit == rank]:
        return Verdict({rank: f"was given up on by rank {culprits[0]}"}, culprits[0])
    if blamed:
        victim, culprit = min(blamed, key=lambda each: each[0] not in suspects)
        return Verdict({culprit: _condition(answers.get(culprit), victim)}, victim)
    chain = _chain(rank, suspects, answers, timeout)
    silent = {peer: WORDS[each] for peer, each in answers.items() if isinstance(each, Silence) and each in WORDS}
    cut_off = [peer for peer, each in answers.items() if each is Silence.UNREACHABLE]
    if len(cut_off) == len(answers) > 1:
        return Verdict({rank: CUT_OFF})
    heard = {peer: words for peer, words in silent.items() if peer not in cut_off}
    late = {peer: LATE for peer in chain if _is_late(answers.get(peer), timeout)}
    for found in (heard, silent, late):
        named = {peer: words for peer, words in found.items() if peer in chain} or found
        if named:
            return Verdict(named, _victim(named, suspects))
    return Verdict({}, chain=tuple(chain))


def _condition(answer: Answer | None, victim: int) -> str:
    """What is the matter with a rank that `victim` has named."""
    if isinstance(answer, Standing):
        return LATE
    known = WORDS.get(answer) if answer is not None else None
    return known or f"was given up on by rank {victim}"


def _chain(rank: int, suspects: Collection[int], answers: Mapping[int, Answer], timeout: float) -> list[int]:
    """Those that were waited for, those that they have waited for for long, and so on."""
    chain, ahead = list[int](), list(suspects)
    while ahead:
        peer = ahead.pop(0)
        if peer in chain or peer == rank:
            continue
        chain.append(peer)
        answer = answers.get(peer)
        if isinstance(answer, Standing) and not _is_late(answer, timeout):
            ahead += answer.waits_for
    return chain


def _is_late(answer: Answer | None, timeout: float) -> bool:
    return isinstance(answer, Standing) and (not answer.waits_for or answer.seconds < LONG * timeout)


def _victim(named: Collection[int], suspects: Collection[int]) -> int | None:
    """Through whom they have failed this rank, if it did not wait for them itself."""
    return None if set(named) & set(suspects) else next(iter(suspects), None)
