"""Sparse data-parallel training, complete: torchrun --standalone --nproc-per-node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import spardl

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
sync = spardl.attach(model, optimizer=optimizer, density=0.01)

source = torch.Generator().manual_seed(rank)  # each rank has data of its own
for _ in range(200):
    inputs = torch.randn(32, 64, generator=source)
    labels = inputs[:, :10].argmax(dim=1)
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()

checkpoint = {
    "model": model.module.state_dict(),
    "optimizer": optimizer.state_dict(),
    "sync": sync.gathered_state_dict(),  # of all ranks, so all of them call it
}
if rank == 0:
    torch.save(checkpoint, "checkpoint.pt")
    total = sync.stats().total
    print(f"loss {loss.item():.2f}; {total.bytes_sent / total.steps:.0f} bytes per step for {total.elements} elements")
dist.destroy_process_group()
