"""The discrete cosine transform of a flat tensor, tile by tile: orthonormal, so its transpose is its inverse.

DeMo selects among coefficients of tiles: what is smooth over a matrix is then few entries. Here a tile is 4,096
consecutive elements as 64 x 64, and what is left of a tensor is cut into runs of 64; fewer than that stay as they are.
"""

import functools
import math

import torch
from torch import Tensor

SIDE = 64
TILE = SIDE * SIDE


@functools.cache
def basis(device: torch.device) -> Tensor:
    """Row i holds the cosine of frequency i (DCT-II)."""
    places = torch.arange(SIDE, dtype=torch.float64)
    rows = torch.cos(math.pi / SIDE * (places + 0.5) * places[:, None]) * math.sqrt(2 / SIDE)
    rows[0] /= math.sqrt(2)
    return rows.to(device, torch.float32)


def forward(flat: Tensor) -> Tensor:
    """The coefficients of a flat tensor, as a new one of the same size."""
    return _apply(flat, basis(flat.device))


def inverse(coefficients: Tensor) -> Tensor:
    """What `forward` was given."""
    return _apply(coefficients, basis(coefficients.device).T)


def _apply(flat: Tensor, rows: Tensor) -> Tensor:
    out = flat.clone()
    tiles = flat.numel() // TILE * TILE
    runs = tiles + (flat.numel() - tiles) // SIDE * SIDE
    if tiles:
        out[:tiles] = (rows @ flat[:tiles].view(-1, SIDE, SIDE) @ rows.T).flatten()
    if runs > tiles:
        out[tiles:runs] = (flat[tiles:runs].view(-1, SIDE) @ rows.T).flatten()
    return out
