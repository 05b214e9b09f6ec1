"""How the ranks of a group that is to be made find each other: in a part of the default group's store.

Every access has a deadline: torch's own would wait without end for a server whose process is stopped. Who does not
come is named, by the same words on all ranks that did.
"""

import time
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from spardl.errors import PeerError
from spardl.transport.members import Members
from spardl.transport.patience import PROBE_S, store_is_silent, within

GRACE_S = 0.5  # beyond the timeout, for the store to answer
FAREWELL_S = 1.0  # for which rank 0, whose end is the store's, waits until the others have heard who is missing
SHORTEST_NAP_S, LONGEST_NAP_S = 0.5e-3, 0.05


class Meeting:
    """One rank's part in it, among those that are to come.

    place  the part of the store that only this group uses; None where torch hides the store

    The store itself counts the groups that each rank has made so far, as all of them do: a count of ours would outlive
    the process group and differ from that of a rank that was restarted.
    """

    def __init__(self, members: Members, timeout: float) -> None:
        ranks, rank = members.ranks, members.rank
        self._ranks, self._rank, self._timeout, self._known = ranks, rank, timeout, members.known
        self._whole: Any = members.store
        self.place: Any = None
        if self._whole is not None:
            self._all: Any = PrefixStore(f"spardl/{zlib.crc32(repr(ranks).encode())}", self._whole)
            self._number: int = self._ask(lambda: self._all.add(f"made/{rank}", 1))
            self.place = PrefixStore(str(self._number), self._all)

    def gather(self, text: str) -> list[str]:
        """Every rank's text, in rank order. Collective: who does not come is named."""
        texts: list[str] = self._ask(lambda: self._gather(text))
        return texts

    def answers(self) -> bool:
        """Whether the store is still there."""
        try:
            return bool(within(PROBE_S, lambda: self.place.check([f"here/{self._rank}"]), TimeoutError))
        except (TimeoutError, dist.DistError):
            return False

    def silent(self) -> PeerError:
        """The error for a store that does not answer."""
        keeper = None if self._known else "the replica group that was asked to"
        error = store_is_silent(self._whole, self._rank, self._timeout + GRACE_S, keeper=keeper)
        # The one who keeps it is the default group's rank 0, whatever its number here.
        if error.peer == 0 and self._ranks[0] != 0:
            error.peer = self._ranks.index(0) if 0 in self._ranks else None
        return error

    def _ask(self, job: Callable[[], Any]) -> Any:
        try:
            return within(self._timeout + GRACE_S, job, self.silent)
        except dist.DistError as error:
            raise self.silent() from error

    def _gather(self, text: str) -> list[str]:
        place, keys = self.place, [f"here/{peer}" for peer in range(len(self._ranks))]
        place.set(keys[self._rank], text)
        deadline, nap = time.monotonic() + self._timeout, SHORTEST_NAP_S
        while not place.check(keys):
            if place.check(["missing"]) or time.monotonic() > deadline:
                raise self._absence(keys)
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)
        return [value.decode() for value in place.multi_get(keys)]

    def _absence(self, keys: list[str]) -> PeerError:
        """The error for ranks that have not come. The first who gives up decides who they are, for all."""
        place = self.place
        found = [str(peer) for peer, key in enumerate(keys) if not place.check([key])]
        missing = tuple(map(int, place.compare_set("missing", "", ",".join(found)).decode().split(",")))
        if self._rank in missing:
            return self._late(missing)
        place.set(f"heard/{self._rank}", "")
        if self._known and self._ranks[self._rank] == 0:
            self._linger([f"heard/{peer}" for peer in range(len(keys)) if peer not in missing])
        if all(self._came(peer) for peer in missing):
            return self._late(missing)
        return PeerError(
            f"{_listed(missing)} of {len(keys)} did not come within {self._timeout:g} s; all ranks of a group must"
            " attach, or call all_reduce, in the same order.",
            peer=missing[0],
            candidates=missing,
        )

    def _came(self, peer: int) -> bool:
        """Whether a rank has come to this meeting, if only to leave again before it could say so."""
        key = f"made/{peer}"
        return bool(self._all.check([key])) and self._all.add(key, 0) >= self._number

    def _late(self, missing: tuple[int, ...]) -> PeerError:
        others = tuple(peer for peer in range(len(self._ranks)) if peer != self._rank)
        gone = missing if self._rank not in missing else others
        text = f"rank {self._rank}, this one, came too late: {_listed(gone)} had given up waiting for it"
        return PeerError(f"{text} after {self._timeout:g} s.", peer=self._rank)

    def _linger(self, keys: list[str]) -> None:
        deadline = time.monotonic() + FAREWELL_S
        while not self.place.check(keys) and time.monotonic() < deadline:
            time.sleep(LONGEST_NAP_S / 5)


def _listed(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
