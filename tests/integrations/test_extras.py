"""A framework that is not installed is asked for by name, where its adapter is imported and nowhere else; and nothing
that takes long is imported before a script has."""

import subprocess
import sys

WITHOUT = """
import importlib, importlib.util, sys
ADAPTERS = {"lightning": "lightning", "accelerate": "accelerate", "hybrid": "accelerate", "hf": "transformers"}
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ADAPTERS.values() else found(name, *rest)
import spardl, spardl.integrations.attach
SLOW = {"torch.distributed.fsdp", "torch.distributed.tensor"}  # parts of torch that take a second to import
assert not {*ADAPTERS.values(), *SLOW} & set(sys.modules)
for adapter in ADAPTERS:
    try:
        importlib.import_module(f"spardl.integrations.{adapter}")
    except spardl.ConfigError as error:
        print(error)
"""


def test_a_missing_framework_is_named_with_the_command_that_brings_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    told = done.stdout.splitlines()
    commands = [sentence.rpartition(": ")[2] for sentence in told]
    assert commands == [f"pip install {name}" for name in ("lightning", "accelerate", "accelerate", "transformers")]
