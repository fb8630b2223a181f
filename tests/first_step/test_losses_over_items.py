"""Several losses whose backward runs at once: nobody can weigh means over items together."""

import pytest
import torch

from lightning_dp.parallel.reduce import sum_of_losses


def test_losses_are_their_sum_weighted_by_gradients() -> None:
    losses = [torch.tensor(1.0), torch.tensor([2.0, 3.0])]
    assert sum_of_losses(losses, [None, torch.tensor([1.0, 0.5])]) == 4.5


def test_means_over_items_are_refused() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    losses[1].num_items = 3  # type: ignore[attr-defined]  # as steps say it
    with pytest.raises(ValueError, match=r"one loss with num_items, got a backward of 2"):
        sum_of_losses(losses, [None, None])
