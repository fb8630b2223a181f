"""What devices compute and the host reads: it is there when it is read, and waits are few."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from support import oracle
from support.device_kinds import on_accelerators
from support.oracle import Classifier, assert_equal_trees, devices_of, loader, trainer
from torch import Tensor, nn

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.comm.buckets import to_device_coalesced

pytestmark = [on_accelerators, pytest.mark.usefixtures("on")]
counts_waits = pytest.mark.on("sim")  # It counts how often the host waits.


def scaled(devices: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    where = oracle.accelerator()
    scaler = torch.amp.GradScaler(where, init_scale=2.0**12, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", where, scaler)]
    strategy = DataParallelStrategy(**options)
    module, job = Classifier(), trainer(devices, strategy, accelerator=where, plugins=plugins)
    job.fit(module, loader(), loader())
    assert scaler._scale is not None and scaler._scale.device == devices_of(1)[0]
    return scaler.get_scale(), dict(module.state_dict())


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_a_scale_is_on_the_root_where_the_loss_is_on_the_host(mode: str) -> None:
    """A scaler on the host reads what devices have found, and does not wait for it."""
    scale, state = scaled(3, mode=mode, executor="threads", output_device="cpu")
    expected, oracle_state = scaled(1)
    assert scale == expected != 2.0**12
    assert_equal_trees(state, oracle_state, "state", atol=2e-3, rtol=0)


# How often the host waits for a device


class Counted(Classifier):
    """Its loss is a mean over tokens, of which the devices know how many there are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "num_items": (batch[1] >= 0).sum()}


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.net = nn.Sequential(nn.Linear(10, 16), norm, nn.Tanh(), nn.Linear(16, 3))


class Logging(Classifier):
    """Returns more than a loss, and logs a value that is on no replica's device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("elsewhere", torch.ones((), device="cpu"), batch_size=len(x))
        self.log("loss", loss)
        return {"loss": loss, "logits": logits.detach(), "count": (y >= 0).sum()}


class Waits(Callback):
    """How often the host has waited when each step was through."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(torch.sim.host_waits())

    def per_step(self) -> set[int]:
        """Without what is set up at first."""
        pairs = zip(self.seen[1:], self.seen[2:], strict=False)
        return {after - before for before, after in pairs}


TO_HOST: dict[str, Any] = {"output_device": "cpu"}
WAITS: dict[str, tuple[type[Classifier], dict[str, Any], dict[str, Any], int]] = {
    "accumulating": (Classifier, {}, {"accumulate_grad_batches": 2}, 0),
    "clipped": (Classifier, {}, {"gradient_clip_val": 1.0}, 0),
    "batch norm": (Normed, {}, {}, 0),
    "synced batch norm": (Normed, {}, {"sync_batchnorm": True}, 0),
    "means of buffers": (Normed, {"buffers": "mean"}, {}, 0),
    "forward, with batch norm": (Normed, {"mode": "forward"}, {}, 0),
    "logs and outputs to the host": (Logging, TO_HOST, {}, 1),
    "to the host, in order": (Logging, {**TO_HOST, "executor": "inorder"}, {}, 1),
    "items to the host": (Counted, TO_HOST, {}, 1),
    "items on the root": (Counted, {}, {}, 1),  # they decide which losses count
    "forward, to the host": (Normed, {**TO_HOST, "mode": "forward"}, {}, 1),
}


@counts_waits
@pytest.mark.parametrize("case", WAITS)
def test_a_step_waits_once_for_all_that_goes_to_the_host(case: str) -> None:
    make, options, fit, expected = WAITS[case]
    waits, strategy = Waits(), DataParallelStrategy(**{"executor": "threads", **options})
    job = trainer(3, strategy, callbacks=[waits], max_epochs=1, log_every_n_steps=50, **fit)
    job.fit(make(), loader(96, 16), loader(3))
    assert waits.per_step() == {expected}


class WaitsOfValidation(Waits):
    on_validation_batch_end = Waits.on_train_batch_end


@counts_waits
@pytest.mark.parametrize("mode", ["step", "forward"])
def test_an_evaluation_waits_once_for_what_goes_to_the_host(mode: Any) -> None:
    waits, strategy = WaitsOfValidation(), DataParallelStrategy(mode=mode, output_device="cpu")
    trainer(3, strategy, callbacks=[waits]).validate(Classifier(), loader(96, 16), verbose=False)
    assert waits.per_step() == {1}


# What is read is there


class Read(Callback):
    """What callbacks read of a step, at once."""

    def __init__(self) -> None:
        self.seen: list[dict[str, list[float]]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        outputs = outputs if isinstance(outputs, dict) else {"loss": outputs}
        values = {**outputs, **trainer.logged_metrics}
        read = {name: torch.as_tensor(value).flatten().tolist() for name, value in values.items()}
        self.seen.append(read)


def read(make: Any, devices: int, **options: Any) -> list[dict[str, list[float]]]:
    torch.manual_seed(0)
    callback = Read()
    job = trainer(devices, DataParallelStrategy(**options), callbacks=[callback], max_epochs=1)
    job.fit(make(), loader(16, 5), loader(3))  # at last a single sample: two devices have nothing
    return callback.seen


class OwnOutputs(Classifier):
    """Its loss depends on gradients that a step in forward mode takes of outputs on the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        logits = self(x)
        (slope,) = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
        return nn.functional.cross_entropy(logits, y) + slope.square().sum(1).mean()


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("make", [Logging, Counted, OwnOutputs])
def test_all_values_on_the_host_are_there(make: Any, mode: Any, executor: Any) -> None:
    several = read(make, 3, mode=mode, executor=executor, output_device="cpu")
    assert_equal_trees(several, read(make, 1), "values", atol=1e-5, rtol=0)


class HostLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch).cpu()


def test_a_loss_on_the_host_gets_the_gradient_of_a_joint_loss_on_the_root() -> None:
    assert_equal_trees(read(HostLoss, 3), read(HostLoss, 1), "values", atol=1e-5, rtol=0)


@pytest.mark.usefixtures("on_side_streams")
def test_gradients_of_outputs_on_the_host_are_in_order_with_the_callers_streams() -> None:
    """Also where the backward is called by a thread that has others."""

    def backward() -> None:
        for device in devices:
            torch.accelerator.set_stream(torch.Stream(device))
        loss.backward()

    devices = devices_of(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    net(x).square().sum().backward()
    expected = oracle.gradients(net)
    net.zero_grad()
    wrapped = DataParallel(net.to(devices[0]), devices, output_device="cpu")
    loss = wrapped(x).square().sum()
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert_equal_trees(oracle.gradients(net), expected, "gradients", atol=1e-12, rtol=0)
    wrapped.close()


@pytest.mark.on("sim")  # A GPU's copies may have arrived by chance.
@pytest.mark.usefixtures("on")
def test_copies_to_the_host_have_arrived_on_return() -> None:
    own = [torch.arange(1000.0).to(device) * 2 for device in devices_of(3)]
    for value in to_device_coalesced(own, torch.device("cpu")):
        torch.testing.assert_close(value, torch.arange(1000.0) * 2)
