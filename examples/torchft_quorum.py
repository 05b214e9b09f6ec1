"""Local updates between replicas that torchft looks after: python examples/torchft_quorum.py --die-at 25

Its lighthouse says who is there, its process group is what `attach` and `all_reduce` are given. When a replica dies,
those that are left go on with their own weights; at the next quorum the group is configured anew, without it.
"""

import argparse
import os
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import spardl

QUORUM_EVERY = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--die-at", type=int, help="a replica is killed before this step")
    parser.add_argument("--dies", type=int, default=0, help="which one (default: the first)")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica is None:
        sys.exit(launch(options.replicas))
    train(options)


def launch(replicas: int) -> int:
    """A lighthouse, and all replicas on this machine; elsewhere `torchft_lighthouse` and any launcher do that."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200)
    place = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    command = [sys.executable, *sys.argv, "--lighthouse", place]
    started = [subprocess.Popen([*command, "--replica", str(number)]) for number in range(replicas)]
    ended = [process.wait() for process in started]
    lighthouse.shutdown()
    return max(code for code in ended if code != -signal.SIGKILL)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=10))
    manager = Manager(
        pg=group,
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        min_replica_size=1,
        use_async_quorum=False,  # the group is what it will be when start_quorum returns
        init_sync=False,  # attach gives all the same weights
        replica_id=f"replica-{options.replica}",
        lighthouse_addr=options.lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    while manager.num_participants() < options.replicas:
        manager.start_quorum()

    sync = spardl.attach(
        model,
        optimizer=optimizer,
        process_group=group,
        update="local",
        on_loss="continue",
        density=0.1,
        dense_below=0,
        timeout=10,
    )
    source = torch.Generator().manual_seed(1 + options.replica)
    target = torch.randn(32, 1, generator=torch.Generator().manual_seed(0)) / 32**0.5
    for step in range(options.steps):
        if step == options.die_at and options.replica == options.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(64, 32, generator=source)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), inputs @ target)
        loss.backward()
        optimizer.step()
        if (step + 1) % QUORUM_EVERY == 0:
            tell_the_mean(manager, group, loss.detach(), f"after {step + 1} steps")
    sync.flush()
    weights = sum(float(each.detach().double().sum()) for each in model.parameters())
    now = sync.company
    print(f"replica {options.replica} is {now.rank} of {now.workers}: weights {weights.hex()}", flush=True)
    manager.shutdown(wait=False)


def tell_the_mean(manager: Manager, group: ProcessGroupGloo, loss: torch.Tensor, when: str) -> None:
    """The loss over those that are in the quorum now: the group is configured anew where that is another one."""
    manager.start_quorum()
    mean = loss.reshape(1).clone()
    try:
        spardl.all_reduce(mean, name="loss", group=group, density=1.0, timeout=5)
    except spardl.PeerError as error:  # it died just now
        manager.report_error(error)
    if manager.should_commit() and manager.participating_rank() == 0:
        print(f"{when}: {manager.num_participants()} replicas, loss {mean.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
