"""spardl.all_reduce: one tensor, averaged in place, with what was not sent kept under its name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import spardl
from processes import on_processes
from spardl.allreduce import forget, stats_of

SETTINGS: dict[str, Any] = {"density": 0.05, "values": "fp32", "dense_below": 0, "timeout": 20}


def vector(rank: int, step: int) -> Tensor:
    return torch.randn(30, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def averaged(rank: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out = torch.zeros(30, 40)
    for step in range(40):
        tensor = vector(rank, step)
        assert spardl.all_reduce(tensor, name="weights", **SETTINGS) is tensor
        found.setdefault("first", tensor.clone())
        out += tensor
    found["out"] = out.clone()
    # What is still waiting comes out as zeros go in.
    for _ in range(60):
        tensor = torch.zeros(30, 40)
        spardl.all_reduce(tensor, name="weights")
        out += tensor
    found["drained"] = out
    found["stats"] = stats_of("weights")
    dense = vector(rank, 0)
    found["dense"] = spardl.all_reduce(dense, name="dense", density=1.0)
    half = vector(rank, 0).bfloat16()
    found["half"] = spardl.all_reduce(half, name="half", **SETTINGS).dtype
    return found


def test_tensors_are_averaged_in_place_and_nothing_is_lost() -> None:
    """Over calls with one name, averages add up to the mean of all that was put in; each sends only its share."""
    workers = 3
    ranks = on_processes(workers, averaged)
    mean = sum(vector(rank, step).double() for rank in range(workers) for step in range(40)) / workers
    for found in ranks:
        assert torch.equal(found["first"], ranks[0]["first"])
        assert torch.count_nonzero(found["first"]) == 60
        assert not torch.allclose(found["out"].double(), mean, atol=0.1), "some of it should still wait"
        assert torch.allclose(found["drained"].double(), mean, atol=1e-4)
        assert torch.allclose(found["dense"], sum(vector(rank, 0) for rank in range(workers)) / workers, atol=1e-6)
        assert found["half"] is torch.bfloat16
        assert found["stats"].steps == 100
        assert found["stats"].entries <= 100 * 60
        assert 0 < found["stats"].bits_per_entry < 64


def misused(rank: int, workers: int) -> dict[str, str]:
    found: dict[str, str] = {}
    spardl.all_reduce(torch.ones(1000), name="known", **SETTINGS)
    cases: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "length": (torch.ones(999), {"name": "known"}),
        "settings": (torch.ones(1000), {"name": "known", "density": 0.5}),
        "strided": (torch.ones(10, 10).t(), {}),
        "integers": (torch.ones(10, dtype=torch.int64), {}),
        "unknown": (torch.ones(10), {"densty": 0.1}),
        "teams": (torch.ones(10), {"teams": 5}),
        "clipping": (torch.ones(10), {"clip_norm": 1.0}),
        "type": (torch.ones(1000, dtype=torch.float64), {"name": "known"}),
    }
    for name, (tensor, options) in cases.items():
        with pytest.raises(spardl.ConfigError) as caught:
            spardl.all_reduce(tensor, **{"name": name, **options})
        found[name] = str(caught.value)
    with pytest.raises(spardl.StateError) as unknown:
        stats_of("never")
    found["never"] = str(unknown.value)
    with pytest.raises(spardl.ConfigMismatch) as mismatch:
        spardl.all_reduce(torch.ones(10 + rank), name="lengths", timeout=20)
    found["mismatch"] = str(mismatch.value)
    return found


def test_misuse_gets_a_sentence() -> None:
    """Another length under a name, other settings, strided or integer tensors, and ranks that differ are refused."""
    expected = {
        "length": "'known' was first synchronised with 1000 elements of torch.float32, now with 999 of",
        "settings": "'known' was first synchronised with other settings; call spardl.forget('known') first",
        "strided": "all_reduce works in place on contiguous tensors; call .contiguous() first.",
        "integers": "all_reduce averages floating-point tensors, not torch.int64",
        "unknown": "there is no setting 'densty'. Did you mean density?",
        "teams": "2 workers cannot form 5 equal teams",
        "clipping": "clip_norm is about the gradients of a model, and this is one vector; leave it out.",
        "type": "'known' was first synchronised with 1000 elements of torch.float32, now with 1000 of torch.float64",
        "never": "nothing was synchronised under the name 'never' yet.",
        "mismatch": "ranks 0 and 1 differ in this all_reduce: elements is 10 on rank 0 and 11 on rank 1",
    }
    for found in on_processes(2, misused):
        assert found.keys() == expected.keys()
        for name, text in found.items():
            assert text.startswith(expected[name]), text


def test_without_a_process_group_it_says_so() -> None:
    """The error names the call that is missing."""
    with pytest.raises(spardl.ConfigError, match="init_process_group"):
        spardl.all_reduce(torch.ones(10))


def poisoned_and_restarted(rank: int, workers: int, file: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spardl.all_reduce(vector(rank, 0), name="v", **SETTINGS)
    bad = vector(rank, 1)
    if rank == 1:
        bad[0, 0] = torch.inf
    found["nan"] = bool(spardl.all_reduce(bad, name="v").isnan().all())
    found["after"] = bool(spardl.all_reduce(vector(rank, 2), name="v").isfinite().all())
    forget("v")
    found["fresh"] = spardl.all_reduce(torch.zeros(500), name="v", **SETTINGS).any().item()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=workers, init_method=f"file://{file}")
    found["restarted"] = torch.count_nonzero(spardl.all_reduce(vector(rank, 3), name="v", **SETTINGS)).item()
    return found


def test_a_name_survives_bad_values_and_starts_anew_when_told(tmp_path: Path) -> None:
    """An infinity on one rank is NaN on all and harms no later call; forget() and a new process group start over."""
    for found in on_processes(2, poisoned_and_restarted, str(tmp_path / "meeting")):
        assert found == {"nan": True, "after": True, "fresh": False, "restarted": 60}
