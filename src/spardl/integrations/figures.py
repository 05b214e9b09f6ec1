"""A few numbers on a synchronisation, under the names that loggers show them by."""

from spardl.integrations.handle import SyncHandle


def figures(sync: SyncHandle) -> dict[str, float]:
    """Of this rank, from the beginning until now; waits for an exchange that is under way.

    How much of an exchange backward hides nobody can tell, so that seconds exposed are told of other ways only.
    """
    stats = sync.stats()
    total = stats.total
    steps = max(1, total.steps)
    busy = total.seconds_selecting + total.seconds_packing + total.seconds_waiting + total.seconds_transferring
    found = {
        "spardl/bytes_per_step": total.bytes_sent / steps,
        "spardl/density": total.density,
        "spardl/seconds_per_step": busy / steps,
    }
    return {**found, "spardl/seconds_exposed": stats.seconds_exposed} if stats.seconds_exposed else found
