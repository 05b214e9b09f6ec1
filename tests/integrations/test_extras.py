"""A framework that is not installed is asked for by name, where its adapter is imported and nowhere else."""

import subprocess
import sys

import pytest

ADAPTERS = {"lightning": "lightning", "accelerate": "accelerate", "hf": "transformers"}

WITHOUT = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {framework!r} else found(name, *rest)
import spardl, spardl.integrations.attach
assert {framework!r} not in sys.modules
try:
    import spardl.integrations.{adapter}
except spardl.ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(("adapter", "framework"), ADAPTERS.items())
def test_a_missing_framework_is_named_with_the_command_that_brings_it(adapter: str, framework: str) -> None:
    script = WITHOUT.format(adapter=adapter, framework=framework)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"pip install {framework}" in done.stdout
