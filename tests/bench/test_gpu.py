"""The script for somebody with GPUs runs without one, and says that it found none."""

import json
from pathlib import Path

import torch

from forked import module_forked
from spardl.bench import gpu


def test_it_runs_alone_on_a_cpu_and_writes_a_report(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    found = module_forked("spardl.bench.gpu", "--elements", 20_000, "--steps", 1, "--out", out)
    assert found.returncode == 0, found.stderr
    report = json.loads(out.read_text())
    assert len(report["bits"]) == 11 and all(report["bits"].values())
    assert report["milliseconds"].keys() <= report["explained"].keys()
    assert {"selection", "dense all-reduce", "spardl, bf16", "DDP, fp16 hook"} <= report["milliseconds"].keys()
    if not torch.cuda.is_available():
        assert "no GPU was found" in found.stdout and report["backend"] == "gloo"


def test_other_bits_are_said_aloud() -> None:
    report = dict.fromkeys(("device", "backend", "kernels", "spardl", "torch", "cuda", "nccl", "triton", "python"), "")
    sizes = dict.fromkeys(("workers", "machines", "elements", "density", "steps"), 1)
    times = {"dense all-reduce": 2.0, "selection": 1.0}
    text = gpu.describe({**report, **sizes, "bits": {"one": True, "other": False}, "milliseconds": times})
    assert "the same bits" in text and "OTHER BITS" in text and "1.000 ms    0.50x  a copy of the vector" in text
