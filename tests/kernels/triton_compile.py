"""Run by test_triton.py: compile every loop for GPUs that are not here, for what it was launched with elsewhere.

Where whole numbers were 1, a second time with all of these known, as Triton would. No product is fused with a sum, no
denormal flushed, no quotient or root approximate: all would change bits. No torch is needed.
"""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

source, launched, *capabilities = sys.argv[1:]
found = importlib.util.spec_from_file_location("loops", source)
loops = importlib.util.module_from_spec(found)
found.loader.exec_module(loops)

kinds = json.loads(Path(launched).read_text())
public = {name for name, each in vars(loops).items() if isinstance(each, JITFunction) and name[0] != "_"}
assert public == kinds.keys(), f"never launched: {sorted(public - kinds.keys())}"
for name, (kind, ones) in kinds.items():
    function = getattr(loops, name)
    signature = dict(zip(function.arg_names, [*kind, "constexpr"], strict=True))
    known = {function.arg_names[at]: 1 for at in ones}
    variants = [(signature, {})] + [(signature | dict.fromkeys(known, "constexpr"), known)] * bool(known)
    for capability, (given, numbers) in itertools.product(capabilities, variants):
        program = ASTSource(function, given, {"TILE": loops.TILE, **numbers})
        made = triton.compile(program, target=GPUTarget("cuda", int(capability), 32), options=loops.OPTIONS)
        assert made.asm["cubin"] and f".target sm_{capability}" in made.asm["ptx"]
        assert not any(each in made.asm["ptx"] for each in ("fma", ".ftz", ".approx", "div.full")), name
print(len(kinds), "compiled")
