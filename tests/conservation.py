"""The oracle of most tests: what all ranks put in equals what they got out plus what they kept."""

import torch


def total(tensors):
    return sum(tensor.double() for tensor in tensors)


def heavy_tailed(count, length, generator):
    return [torch.randn(length, generator=generator) ** 3 for _ in range(count)]


def check_step(cluster, gradients):
    """One step of a simulated cluster under the conservation law; returns the average that all ranks hold."""
    before = total(gradients) + total(cluster.residuals())
    size = total([t.abs() for t in gradients]) + total([t.abs() for t in cluster.residuals()])
    results = cluster.step(gradients)
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0]), f"rank {rank} holds another result than rank 0"
    lost = (before - len(gradients) * results[0].double() - total(cluster.residuals())).abs()
    worst = int((lost - 1e-5 * size).argmax())
    assert lost[worst] <= 1e-5 * size[worst], f"coordinate {worst} lost {lost[worst]:.3g} of {size[worst]:.3g}"
    return results[0]
