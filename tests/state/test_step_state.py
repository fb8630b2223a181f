"""What modules keep on self between steps: states, cached tensors, averages, outputs."""

from typing import Any

import pytest
import torch
from oracle import EPOCHS, Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")


def full_batches() -> Any:
    """Batches of one size, as a state that goes on from batch to batch demands."""
    return loader(n=48, batch_size=12)


class Stateful(Classifier):
    """Goes on from the state in which the batch before it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(10, 10)
        self.state: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        state = torch.zeros_like(x) if self.state is None else self.state
        state = self.cell(x, state)
        self.state = state.detach()
        return F.cross_entropy(self.net(state), y)

    def forget(self) -> None:
        self.state = None

    on_train_epoch_start = on_validation_epoch_start = on_test_epoch_start = forget


@pytest.mark.filterwarnings("ignore:A step binds Stateful.state to different values")
@pytest.mark.parametrize("strategy", [{}, {"weights": [2, 1, 0]}], ids=str)
def test_a_recurrent_state_stays_with_its_samples(strategy: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    actual = run(Stateful, 3, data=full_batches, strategy=strategy)
    assert_same(actual, run(Stateful, 1, data=full_batches))


def test_equal_values_on_all_devices_are_no_news() -> None:
    class Caching(Classifier):
        mask: Tensor | None = None

        def loss(self, batch: Any) -> Tensor:
            if self.mask is None:
                self.mask = torch.arange(10, device=self.device) % 3 > 0
            assert self.mask.device == self.device
            return super().loss([batch[0] * self.mask, batch[1]])

    torch.set_default_dtype(torch.float64)
    results = [run(Caching, k) for k in (3, 1)]  # four Trainers one after another: masks remain
    assert_same(*results)


class WithTensor(Classifier):
    """A tensor on self that nobody registered as a buffer; hooks bring it where the module is."""

    scale: Tensor
    how = "write"

    def on_fit_start(self) -> None:
        self.scale = torch.ones(10, device=self.device)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.how == "write":
            self.scale *= 0.9
        else:
            self.scale = self.scale * 0.9

    def loss(self, batch: Any) -> Tensor:
        assert self.scale.device == self.device
        return super().loss([batch[0] * self.scale, batch[1]])


@pytest.mark.parametrize("how", ["write", "bind"])
def test_tensors_on_self_are_where_their_replica_is(how: str) -> None:
    torch.set_default_dtype(torch.float64)
    kind = type("WithTensor", (WithTensor,), {"how": how})
    assert_same(run(kind, 3), run(kind, 1))


@pytest.mark.usefixtures("unchecked")
def test_a_tensor_that_steps_write_to_in_place_is_named_once() -> None:
    class Adding(Classifier):
        def on_fit_start(self) -> None:
            self.total = torch.zeros((), device=self.device)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.total += batch[0].sum().detach()
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="writes in place to .*Adding.total, once on") as caught:
        trainer(3, max_epochs=2).fit(Adding(), loader(), loader())
    assert len([w for w in caught if "in place" in str(w.message)]) == 1


@pytest.mark.parametrize("mode", ["step", "forward"])
@pytest.mark.parametrize("how", ["in place", "assigned", "through data"])
def test_averages_in_buffers_that_hooks_update(how: str, mode: str) -> None:
    class Averaging(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(10))
            self.register_buffer("updates", torch.tensor(0))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            mean = 0.9 * self.mean + 0.1 * batch[0].to(self.device).mean(0)
            if how == "assigned":
                self.mean = mean
            elif how == "in place":
                self.mean.copy_(mean)
            else:
                self.mean.data.copy_(mean)
            self.updates += 1

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x - self.mean)

    torch.set_default_dtype(torch.float64)
    several, one = run(Averaging, 3, strategy={"mode": mode}), run(Averaging, 1)
    assert_same(several, one)
    assert several.module.mean.abs().max() > 0 and int(several.module.updates) == 3 * EPOCHS


def test_an_average_network_follows_in_a_hook() -> None:
    """A teacher: parameters without gradient, moved after every step."""

    class Taught(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(10, 3).requires_grad_(False)
            self.student = nn.Linear(10, 3)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            agreement = F.mse_loss(self.student(x), self.teacher(x))
            return F.cross_entropy(self.student(x), y) + agreement

        @torch.no_grad()
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for teacher, student in pairs:
                teacher.lerp_(student, 0.1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.student.parameters(), 0.1)

    torch.set_default_dtype(torch.float64)
    assert_same(run(Taught, 3), run(Taught, 1))


def test_lists_bound_anew_every_epoch_are_filled_as_on_one_device() -> None:
    class Collecting(Classifier):
        seen: list[Tensor]

        def on_validation_epoch_start(self) -> None:
            self.seen = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(self.net(batch[0]))

        def on_validation_epoch_end(self) -> None:
            logits = torch.cat(self.seen)
            self.log("rank", (logits[:, 0].argsort() * torch.arange(len(logits)).to(logits)).mean())

    torch.set_default_dtype(torch.float64)
    assert_same(run(Collecting, 3), run(Collecting, 1))


def test_after_an_error_nothing_of_a_step_remains() -> None:
    class Failing(Stateful):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if len(batch[0]) == 3 and self.trainer.training and self.armed:
                raise LookupError("here")
            return loss

    module, data = Failing(), full_batches()
    module.armed = True
    job = trainer(3, DataParallelStrategy(weights=[5, 4, 3]), max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(LookupError, match="here"):
        job.fit(module, data, data)
    module.armed = False
    module.state = None
    with pytest.warns(UserWarning, match=r"Failing\.state to .* every replica goes on from its"):
        job.fit(module, data, data)
    assert job.current_epoch == 1
