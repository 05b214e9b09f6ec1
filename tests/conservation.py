"""The oracle of most tests: what all ranks put in equals what they got out plus what they kept."""

import torch


def total(tensors):
    return sum(tensor.double() for tensor in tensors)


def heavy_tailed(count, length, generator):
    return [torch.randn(length, generator=generator) ** 3 for _ in range(count)]


def check_step(cluster, gradients):
    """One step of a simulated cluster under the conservation law; returns the average that all ranks hold.

    Up to what float32 rounds: of what goes in, and of what comes out, which a coarse format makes much larger where a
    value is far below all levels.
    """
    before = total(gradients) + total(cluster.residuals())
    size = total([t.abs() for t in gradients]) + total([t.abs() for t in cluster.residuals()])
    results = cluster.step(gradients)
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0]), f"rank {rank} holds another result than rank 0"
    after = len(gradients) * results[0].double()
    lost = (before - after - total(cluster.residuals())).abs()
    allowed = 1e-5 * size + 1e-6 * (after.abs() + total([t.abs() for t in cluster.residuals()]))
    worst = int((lost - allowed).argmax())
    assert lost[worst] <= allowed[worst], f"coordinate {worst} lost {lost[worst]:.3g} of {size[worst]:.3g}"
    return results[0]
