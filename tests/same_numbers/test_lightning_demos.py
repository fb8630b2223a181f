"""Lightning's own demo modules, without dropout and small, give what one device gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from support import oracle
from support.oracle import assert_as_one_device, assert_equal_trees
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")

WORDS, BLOCK = 30, 6
BATCH = 7  # of 20 samples: 7, 7 and a last batch of 6


def without_dropout(module: nn.Module) -> Any:
    """Replicas draw other random numbers than one device does."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Dropout):
            submodule.p = 0.0
    return module


def small_transformer() -> LightningModule:
    module = LightningTransformer(WORDS)
    module.model = Transformer(WORDS, ninp=16, nhid=16, dropout=0.0)
    return module


def text(blocks: int) -> TensorDataset:
    """Blocks of words, and the same ones a word later, as the demos' WikiText2 has them."""
    words = torch.randint(WORDS, (blocks * BLOCK + 1,), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words[:-1].view(-1, BLOCK), words[1:].view(-1, BLOCK))


class Digits(LightningModule):
    """The network of the MNIST demos."""

    def __init__(self) -> None:
        super().__init__()
        self.net = boring.Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.nll_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def vectors() -> DataLoader[Any]:
    return DataLoader(boring.RandomDataset(32, 20), BATCH)


def images() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(8, 1, 28, 28), torch.arange(8)), 5)


MODULES: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]] = {
    "boring": (boring.BoringModel, vectors, {}),
    "boring, one by one": (boring.BoringModel, boring.BoringModel().train_dataloader, {}),
    "demo": (lambda: boring.DemoModel(learning_rate=0.001), vectors, {"loss_reduction": "sum"}),
    "digits": (Digits, images, {}),
    "transformer": (small_transformer, lambda: DataLoader(text(20), BATCH), {}),
    "manual optimisation": (boring.ManualOptimBoringModel, vectors, {"mode": "step"}),
    "manual, forward": (boring.ManualOptimBoringModel, vectors, {"mode": "forward"}),
}


def fit(make: Any, data: Any, devices: int, **strategy: Any) -> Any:
    torch.manual_seed(0)
    module = without_dropout(make())
    module.prepare_data = lambda: None  # the demos would load their texts from the net
    chosen = DataParallelStrategy(**strategy) if devices > 1 else "auto"
    job = oracle.trainer(devices, chosen, max_epochs=2, limit_train_batches=5)
    torch.manual_seed(1)
    job.fit(module, data())
    return module.state_dict(), dict(job.callback_metrics)


@pytest.mark.parametrize("name", MODULES)
def test_demo_modules_are_trained_as_on_one_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "transformer":  # an exponential of floats, on the device, says which place it is
        monkeypatch.setitem(oracle.GPU_ROUNDING, torch.float64, 1e-8)
    torch.set_default_dtype(torch.float64)
    make, data, strategy = MODULES[name]
    results = [fit(make, data, devices, **strategy) for devices in (3, 1)]
    assert_equal_trees(*results, name, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", [boring.BoringDataModule, boring.BoringDataModuleNoLen])
def test_demo_data_modules(kind: Any) -> None:
    def results(k: int) -> Any:
        module, data = boring.BoringModel(), kind()
        limits = {f"limit_{stage}_batches": 4 for stage in ("train", "val", "test", "predict")}
        job = oracle.trainer(k, "auto" if k == 1 else "dp_custom", max_epochs=1, **limits)
        job.fit(module, datamodule=data)
        job.validate(module, datamodule=data, verbose=False)
        job.test(module, datamodule=data, verbose=False)
        return module.state_dict(), job.predict(module, datamodule=data)

    torch.set_default_dtype(torch.float64)
    assert_as_one_device(results)
