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
    assert len(report["bits"]) == 4 and all(report["bits"].values())
    assert {"selection", "dense all-reduce", "spardl, bf16", "DDP, fp16 hook"} <= report["milliseconds"].keys()
    if not torch.cuda.is_available():
        assert "no GPU was found" in found.stdout and report["backend"] == "gloo"


def test_other_bits_are_said_aloud() -> None:
    report = {"device": "", "workers": 1, "backend": "", "torch": "", "elements": 1, "density": 1, "kernels": ""}
    text = gpu.describe({**report, "bits": {"one": True, "other": False}, "milliseconds": {"x": 1.0}})
    assert "the same bits" in text and "OTHER BITS" in text and "1.000 ms" in text
