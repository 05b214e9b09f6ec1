"""What passes between host and device."""

import pytest
import torch

from spardl.host import marked


@pytest.mark.parametrize("missing", [False, True], ids=["", "where torch has no nonzero_static"])
@pytest.mark.parametrize(("mask", "count", "found"), [
    ([0, 1, 0, 1, 1], 3, [1, 3, 4]),
    ([0, 1, 0, 1, 1], 2, [1, 3]),
    ([0, 1, 0, 0, 1], 4, [1, 4, 9, 9]),
    ([0, 0], 1, [9]),
    ([1, 1], 0, []),
    ([], 2, [9, 9]),
])  # fmt: skip
def test_places_where_a_mask_holds(
    monkeypatch: pytest.MonkeyPatch, mask: list[int], count: int, found: list[int], missing: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError

    if missing:
        monkeypatch.setattr(torch, "nonzero_static", refuse)
    assert marked(torch.tensor(mask, dtype=torch.bool), count, 9).tolist() == found
