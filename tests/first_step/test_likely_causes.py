"""Errors about devices that come from objects that replicas share: the note says so."""

from typing import Any

import pytest
import torch
from support import oracle
from support.device_kinds import on_separate
from support.forward_twins import said
from support.oracle import loader, trainer
from torch import Tensor

from lightning_dp import DataParallelStrategy

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.filterwarnings("ignore")]


class OfPrior(oracle.Classifier):
    """A distribution is not moved by `to`."""

    def on_fit_start(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(10, device=self.device), 1.0)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) - self.prior.log_prob(batch[0]).mean()


class OfSize(oracle.Classifier):
    """Knows the batch's size by heart."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0].view(25, 10), batch[1]])


@on_separate
@pytest.mark.parametrize("kind", [OfPrior, OfSize])
def test_only_a_tensor_on_another_device_has_this_note(kind: type[oracle.Classifier]) -> None:
    torch.manual_seed(0)
    with pytest.raises(RuntimeError) as caught:
        trainer(3, DataParallelStrategy(), max_epochs=1).fit(kind(), loader(50))
    text = said(caught.value)
    assert "of 25" in text and ("register_buffer" in text) is (kind is OfPrior)
