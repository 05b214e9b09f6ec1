"""Fellows, who hold the parts of one model, and members that may not share a group."""

import torch

from processes import on_processes
from spardl import PeerError, StateError, SyncConfig
from spardl.sync.fellows import Fellows
from spardl.sync.plan import Member, plan_model


def _agree(rank, workers):
    fellows = Fellows(None, timeout=10)
    found = [fellows.agree(True), fellows.agree(rank != 1), fellows.least(3.0 - rank)]
    mean = torch.full((2,), float(rank), dtype=torch.float64)
    fellows.average(mean)
    texts = []
    if rank == 2:
        fellows.leave()
    for _ in range(2):
        try:
            fellows.agree(True)
        except (PeerError, StateError) as error:
            texts.append(str(error))
            fellows.leave()
    return fellows.position, fellows.count, found, mean.tolist(), texts


def test_what_one_of_them_refuses_all_refuse_and_who_leaves_is_missed_at_once():
    for rank, (position, count, found, mean, texts) in enumerate(on_processes(3, _agree)):
        assert (position, count) == (rank, 3)
        assert found == [True, False, 1.0] and mean == [1.0, 1.0]
        first, second = texts
        assert ("ended" if rank == 2 else "gone") in first and "ended" in second


def test_members_of_different_kinds_share_no_group():
    members = [Member("a", 5, "x"), Member("b", 7, "y"), Member("c", 6, "x"), Member("d", 9, "x")]
    names = [plan.names for plan in plan_model(SyncConfig(dense_below=0), members, 2)]
    assert names == [["a", "c", "d"], ["b"]]
    names = [plan.names for plan in plan_model(SyncConfig(dense_below=0, groups=11), members, 2)]
    assert names == [["a", "c"], ["d"], ["b"]]
