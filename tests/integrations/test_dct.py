"""The cosine transform behind DeMo."""

import pytest
import torch

from spardl.integrations import dct


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100, 4096, 4097, 4096 + 64, 10_000])
def test_it_is_undone_by_its_inverse_and_keeps_norms(length):
    values = torch.randn(length, generator=torch.Generator().manual_seed(0))
    coefficients = dct.forward(values)
    torch.testing.assert_close(dct.inverse(coefficients), values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(coefficients.norm(), values.norm())


def test_what_is_smooth_over_a_tile_is_few_coefficients():
    places = torch.linspace(0, 3.0, 64)
    tile = (torch.cos(places)[:, None] * torch.sin(places)).flatten()
    energy = dct.forward(tile).square().sort(descending=True).values
    assert energy[:40].sum() > 0.999 * energy.sum()


def test_a_run_of_sixty_four_is_the_textbook_transform():
    values = torch.randn(64, generator=torch.Generator().manual_seed(1)).double()
    places = torch.arange(64, dtype=torch.float64)
    expected = (
        torch.stack([(values * torch.cos(torch.pi / 64 * (places + 0.5) * k)).sum() for k in range(64)]) / 32**0.5
    )
    expected[0] /= 2**0.5
    torch.testing.assert_close(dct.forward(values.float()).double(), expected, rtol=1e-4, atol=1e-5)
