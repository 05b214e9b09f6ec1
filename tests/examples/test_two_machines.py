"""examples/two_machines.md: its commands work as they stand, with both machines here."""

import re
import shlex
import socket
from pathlib import Path

import pytest

from commands import environment, start

ROOT = Path(__file__).parents[2]


def commands_for(port: int) -> list[list[str]]:
    """What the page has one type on each machine, with an address and a port of this one."""
    page = (ROOT / "examples" / "two_machines.md").read_text(encoding="utf-8")
    block = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[0]
    lines = [line for line in block.splitlines() if line.startswith("torchrun")]
    here = [line.replace("10.0.0.1", "127.0.0.1").replace("29500", str(port)) for line in lines]
    return [shlex.split(line)[1:] for line in here]


@pytest.mark.slow
def test_the_two_commands_train_one_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    variables = environment(OMP_NUM_THREADS=1, GLOO_SOCKET_IFNAME="lo")
    how = {"module": "torch.distributed.run", "cwd": tmp_path, "env": variables}
    machines = [start(*command, **how) for command in commands_for(port)]
    try:
        said = [machine.communicate(timeout=100) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert re.fullmatch(r"loss \S+; \d+ bytes per step for \d+ elements\n", said[0][0] + said[1][0])
