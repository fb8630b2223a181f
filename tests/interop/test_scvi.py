"""scvi-tools: a variational autoencoder of gene counts, with a plan of training and metrics."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from comparison import Job, as_one_device, distance
from torch.utils.data import DataLoader

pytest.importorskip("scvi")

from anndata import AnnData
from scvi import settings
from scvi.dataloaders import AnnDataLoader
from scvi.model import SCVI
from scvi.train import TrainingPlan

pytestmark = pytest.mark.interop

CELLS, GENES = 70, 12


@pytest.fixture(autouse=True)
def the_mean_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas draw other random numbers than one device does; the mean is the same for all."""
    monkeypatch.setattr(torch.distributions.Normal, "rsample", lambda self, shape=(): self.loc)


@cache
def counts() -> AnnData:
    random = np.random.default_rng(0)
    cells = AnnData(random.poisson(2.0, (CELLS, GENES)).astype(np.float32))
    cells.obs["batch"] = [f"batch {i % 3}" for i in range(CELLS)]
    SCVI.setup_anndata(cells, batch_key="batch")
    return cells


def model() -> SCVI:
    norms = {"use_batch_norm": "none", "use_layer_norm": "both"}
    return SCVI(counts(), n_hidden=16, n_latent=4, dropout_rate=0.0, **norms)


class Plan(TrainingPlan):
    """Predicts where cells lie in the latent space."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch, loss_kwargs=self.loss_kwargs)[0]["z"]


def plan() -> Plan:
    plan = Plan(model().module, lr=1e-2, n_epochs_kl_warmup=4)
    plan.n_obs_training = CELLS
    return plan


def cells() -> DataLoader[Any]:
    rows = AnnDataLoader(model().adata_manager, shuffle=False, batch_size=16)  # the last has 6
    return DataLoader(list(rows), batch_size=None)


# Its metrics count their updates, which several devices make by shards, beside samples and sums.
COUNTS = r"(?s)check_first_step.*A metric has seen other samples.*n_batches: 1 on one device, 3 on"
VAE = Job("scvi-tools", "SCVI", plan, cells, trainer={"precision": "64-true"}, warns=(COUNTS,))


# The module returns its loss, and sums over cells, which have to be told from means.
SUMS = dict.fromkeys(("reconstruction_loss_sum", "kl_local_sum"), "sum")
OVERRIDES = {"loss": "mean", "kl_global_sum": "mean", **SUMS}
FORWARD = {"mode": "forward", "gather_overrides": OVERRIDES}
test_as_one_device = as_one_device((VAE, {}), (VAE, FORWARD))


@pytest.mark.filterwarnings("ignore:(?s)check_first_step.*n_batches")
def test_the_librarys_own_trainer(on: str) -> None:
    """It is told by the strategy's name."""

    def trained(accelerator: str, **options: Any) -> SCVI:
        settings.seed = 0
        itself = model()
        itself.train(
            max_epochs=5,
            train_size=0.8,
            batch_size=16,
            plan_kwargs={"lr": 1e-2, "n_epochs_kl_warmup": 4},
            precision="64-true",
            accelerator=accelerator,
            enable_progress_bar=False,
            **options,
        )
        return itself

    expected, actual = trained("cpu", devices=1), trained(on, devices=3, strategy="dp_custom")
    states = [itself.module.state_dict() for itself in (actual, expected)]
    assert distance(*states, "state") < 1e-9
    histories = [{k: v.to_dict("list") for k, v in m.history.items()} for m in (actual, expected)]
    assert "elbo_train" in histories[0] and distance(*histories, "history") < 1e-5  # single
