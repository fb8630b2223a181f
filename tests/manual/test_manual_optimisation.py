"""Manual optimisation in step mode: what a step does with optimizers, all replicas do together."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors import data_connector
from oracle import Classifier, assert_same, loader, run, trainer
from torch import Tensor, nn
from torch.autograd import backward as backward_by_name
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.workers.participant import RendezvousError

pytestmark = [
    pytest.mark.usefixtures("on"),
    pytest.mark.filterwarnings(r"ignore:A step binds \w+.made to different values"),
]


class Manual(Classifier):
    """One optimizer, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        items = getattr(loss, "num_items", None)
        size = None if items is None else int(items)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("train/after", self.loss(batch), batch_size=size)
        return loss


class Adversarial(Classifier):
    """Two networks, two optimizers; samples of the batch stand for noise."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.net
        self.generator = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 10))
        self.critic = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
        self.unused = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]

    def criticise(self, batch: Any) -> Tensor:
        real, noise = batch[0], batch[0].square()
        return self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()

    def cheat(self, batch: Any) -> Tensor:
        self.made = self.generator(batch[0].square())  # each replica's own, in the whole step
        return -self.critic(self.made).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_critic)
        assert not any(p.requires_grad for p in self.generator.parameters())
        loss = self.criticise(batch)
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        cheat = self.cheat(batch)
        for_generator.zero_grad()
        self.manual_backward(cheat)
        assert len(self.made) == len(batch[0])
        assert all(p.grad is None for p in self.unused.parameters())
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        assert all(p.requires_grad for p in self.parameters())
        self.log_dict({"critic": loss, "cheat": cheat}, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/critic", self.critic(self.generator(batch[0])).mean())

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test/critic", self.critic(batch[0]).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.generator(batch[0])


class Penalised(Adversarial):
    """With a gradient penalty, as in WGAN-GP."""

    def criticise(self, batch: Any) -> Tensor:
        between = (batch[0] + 0.3).requires_grad_()
        score = self.critic(between).sum()
        (slope,) = torch.autograd.grad(score, between, create_graph=True)
        return super().criticise(batch) + (slope.norm(dim=1) - 1).square().mean()


MAY_BE_DONE_TWICE = pytest.mark.filterwarnings("ignore:A step writes in place to 3 parameters")
"""To clamp once more changes nothing, which the warning leaves to its reader."""


class Clamped(Adversarial):
    """Weights clamped through `.data`, as in WGAN."""

    def cheat(self, batch: Any) -> Tensor:
        for p in self.critic.parameters():
            p.data.clamp_(-0.05, 0.05)
        return super().cheat(batch)


class WithClosures(Adversarial):
    """Lightning's other way to write it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for_generator, for_critic = self.optimizers()
        for optimizer, loss_of in ((for_critic, self.criticise), (for_generator, self.cheat)):

            def closure(optimizer: Any = optimizer, loss_of: Any = loss_of) -> None:
                optimizer.zero_grad()
                loss = loss_of(batch)
                self.manual_backward(loss)
                self.log(loss_of.__name__, loss)

            with optimizer.toggle_model(sync_grad=batch_idx % 2 == 0):
                optimizer.step(closure=closure)


class Lbfgs(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Masked(Manual):
    """A mean over some of the samples: the loss tells over how many."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y, ignore_index=0)
        loss.num_items = (y != 0).sum()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return

    test_step = validation_step


class MaskedClosures(Lbfgs, Masked):
    """The optimizer looks at the losses that the closures return."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn="strong_wolfe")


class Accumulating(Manual):
    """Steps every other batch, after it has looked at the gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.log("norm", norm, on_step=True, on_epoch=True)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss, "n": batch_idx}


class ClippingByHand(Manual):
    """With torch's own function, on each replica."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("norm", norm)
        optimizer.step()
        self.zero_grad()


class Clipping(Manual):
    algorithm = "norm"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.01, self.algorithm)
        self.log("largest", torch.stack([p.grad.abs().max() for p in self.parameters()]).max())
        optimizer.step()


class ClippingValues(Clipping):
    algorithm = "value"


class PlainTorch(Manual):
    """Direct calls: plain optimizers, and backward of the loss itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.trainer.optimizers[0].zero_grad()
        loss = self.loss(batch)
        loss.backward(torch.tensor(-1.0).to(loss), retain_graph=True)
        (2 * loss).backward(inputs=list(self.net[2].parameters()))
        torch.autograd.backward([self.loss(batch), 2 * self.loss(batch)])
        optimizer.step()
        return loss


class ImportedByName(Manual):
    """Backwards of a function that was imported by its name, of several losses with gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        backward_by_name(self.loss(batch), retain_graph=True)
        losses = [self.loss(batch), 2 * self.loss(batch)]
        backward_by_name(losses, [torch.tensor(sign).to(losses[0]) for sign in (1.0, -0.25)])
        optimizer.step()


class Scheduled(Manual):
    """A schedule per step, and one by the step's loss, with the patience of none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        first, second = self.lr_schedulers()
        first.step()
        second.step(loss.detach())
        self.log("lr", self.optimizers().param_groups[0]["lr"], on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedules = torch.optim.lr_scheduler
        return [optimizer], [
            schedules.ExponentialLR(optimizer, 0.9),
            schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.7),
        ]


class Decaying(Manual):
    """The step changes options of its optimizer, and looks at them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group.update(weight_decay=group["weight_decay"] + group.get("extra", 0.1))
        super().training_step(batch, batch_idx)
        group["lr"] *= 0.9
        assert group.setdefault("extra", 0.2) == 0.2
        self.log("lr", group["lr"] * len(batch[0]), on_step=True, reduce_fx="sum")


class DecayingWithSchedule(Decaying):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        self.log("then", self.optimizers().param_groups[0]["lr"], on_step=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 1.05)]


class DecayingByItself(Classifier):
    """Automatic optimisation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        group = self.trainer.optimizers[0].param_groups[0]
        group["lr"] *= 0.9
        self.log("lr", group["lr"], on_step=True)
        return super().training_step(batch, batch_idx)


class Warming(Manual):
    """Sets the learning rate itself, and takes a second look after an extra step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 * (1 + self.global_step)
        super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


class Contrastive(Manual):
    """All replicas' samples in one loss: their graphs go on in each other."""

    def loss(self, batch: Any) -> Tensor:
        z = self.all_gather(self.net(batch[0]), sync_grads=True)
        return (z @ z.T).logsumexp(1).mean() - z.square().sum(1).mean()


class Normed(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        )


class Frozen(Manual):
    """Trains a part at a time, and gives hooks of parameters the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.net[2].weight.register_hook(lambda g: self.seen.append(float(g.sum())) or 2 * g)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].weight.requires_grad_(False)
        super().training_step(batch, batch_idx)
        self.net[0].weight.requires_grad_(True)

    def on_train_epoch_end(self) -> None:
        self.log("seen", sum(self.seen))


def compare(make: Callable[[], LightningModule], devices: int, **kwargs: Any) -> None:
    torch.set_default_dtype(torch.float64)
    kwargs = {"max_epochs": 2, **kwargs}
    one_kwargs = {key: value for key, value in kwargs.items() if key != "strategy"}
    several, one = run(make, devices, **kwargs), run(make, 1, **one_kwargs)
    assert_same(several, one)
    assert several.trainer.global_step == one.trainer.global_step


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        Manual,
        Adversarial,
        Penalised,
        pytest.param(Clamped, marks=MAY_BE_DONE_TWICE),
        WithClosures,
        Lbfgs,
        Masked,
        MaskedClosures,
        Accumulating,
        ClippingByHand,
        Clipping,
        ClippingValues,
        PlainTorch,
        ImportedByName,
        Scheduled,
        Decaying,
        DecayingWithSchedule,
        DecayingByItself,
        Warming,
        Contrastive,
        Frozen,
    ],
)
def test_the_numbers_are_those_of_one_device(
    make: Callable[[], LightningModule], devices: int
) -> None:
    compare(make, devices)


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("make", [Adversarial, WithClosures, Lbfgs, Contrastive, PlainTorch])
def test_in_threads_and_in_order(make: Callable[[], LightningModule], executor: str) -> None:
    compare(make, 3, strategy={"executor": executor})


@pytest.mark.parametrize("make", [ClippingByHand, Accumulating, Lbfgs, Adversarial, Decaying])
def test_an_idle_root(make: Callable[[], LightningModule]) -> None:
    compare(make, 3, strategy={"weights": [0, 2, 1]})


def test_the_check_of_the_first_step_changes_no_options() -> None:
    compare(DecayingByItself, 3, strategy={"check_first_step": True})


def test_batch_norm_over_all_replicas() -> None:
    compare(Normed, 3, sync_batchnorm=True)


def test_a_loss_that_is_a_sum() -> None:
    class Sums(Manual):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 50

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return

        test_step = validation_step

    seen: list[list[float]] = [[], []]

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen[trainer.num_devices > 1].append(float(outputs["loss"]))

    compare(Sums, 3, strategy={"loss_reduction": "sum"}, callbacks=[Losses()])
    assert seen[0] == pytest.approx(seen[1], abs=1e-10)


def test_a_shard_without_any_item_counts_for_nothing() -> None:
    class Sparse(Masked):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            kept = x[:, 0] > 0.7
            # Of nothing, not only this is NaN: so is its gradient, whatever it is multiplied by.
            loss = (F.cross_entropy(self.net(x), y, reduction="none") * kept).sum() / kept.sum()
            loss.num_items = int(kept.sum())
            counts.append(loss.num_items)
            return loss

    counts: list[int] = []
    compare(Sparse, 7, limit_train_batches=2)
    assert 0 in counts


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([2, None], ValueError, r"num_items of at least 0 from every replica, got \[2, None\]"),
        ([2, -1], ValueError, r"num_items of at least 0 from every replica, got \[2, -1\]"),
        (["2", "2"], TypeError, "num_items to be a number or a tensor of one element, got str"),
        ([torch.ones(2)] * 2, TypeError, r"one element, got \(2,\)"),
    ],
)
def test_impossible_numbers_of_items_are_named(
    items: list[Any], error: type[Exception], message: str
) -> None:
    class Wrong(Manual):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            loss.num_items = items[len(batch[0]) == 12]
            return loss

    with pytest.raises(error, match=message):
        trainer(2).fit(Wrong(), loader(), loader())


def test_losses_with_numbers_of_items_have_a_backward_each() -> None:
    class Both(Masked):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            torch.autograd.backward([self.loss(batch), self.loss(batch)])

    with pytest.raises(ValueError, match="one loss with num_items, got a backward of 2 tensors"):
        trainer(2).fit(Both(), loader(), loader())


def test_callbacks_and_hooks_see_one_device() -> None:
    def of(devices: int) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        class Record(Callback):
            def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
                assert threading.current_thread() is threading.main_thread()
                calls.append(("before backward", float(loss.detach())))

            def on_after_backward(self, trainer: Any, module: Any) -> None:
                total = sum(float(p.grad.sum()) for p in module.parameters() if p.grad is not None)
                calls.append(("after backward", total))

            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                calls.append(("step", type(optimizer).__name__, trainer.global_step))
                for p in module.critic.parameters():
                    if p.grad is not None:
                        p.grad.mul_(0.5)

            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                calls.append(("end", trainer.global_step))

        torch.manual_seed(0)
        job = trainer(devices, max_epochs=1, callbacks=[Record()], profiler="simple")
        job.fit(Adversarial(), loader(), loader())
        assert "optimizer_step" in job.profiler.recorded_durations
        return calls

    torch.set_default_dtype(torch.float64)
    several, one = of(3), of(1)
    assert len(several) == len(one) > 0
    for a, b in zip(several, one, strict=True):
        assert a[0] == b[0] and a[1:] == pytest.approx(b[1:], abs=1e-10)


def test_replicas_that_do_different_things_are_named() -> None:
    class Uneven(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            if len(batch[0]) == 9:
                optimizer.step()

    with pytest.raises(
        RendezvousError, match=r"replica 0 on \S+ is at step of LightningAdamW \(opti"
    ):
        trainer(3).fit(Uneven(), loader(), loader())


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_an_exception_in_the_middle_arrives_and_another_fit_works(executor: str) -> None:
    class Failing(Manual):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            if self.fails and batch_idx == 1 and len(batch[0]) == 8:
                raise KeyError("mine")
            optimizer.step()

    module = Failing()
    job = trainer(3, DataParallelStrategy(executor=executor), max_epochs=1)
    with pytest.raises(KeyError, match="mine"):
        job.fit(module, loader(), loader())
    assert "step" not in vars(job.strategy.optimizers[0])
    assert not {"manual_backward", "toggle_optimizer"} & set(vars(module))
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"
    module.fails = False
    job.fit(module, loader(), loader())


def test_two_fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread's backwards are its own fit's, and torch's own are back in the end."""
    # Lightning replaces DataLoader's methods while it asks for a loader, one thread at a time.
    turn, replacing = threading.RLock(), data_connector._replace_dunder_methods

    @contextlib.contextmanager
    def in_turn(*args: Any) -> Iterator[None]:
        with turn, replacing(*args):
            yield

    monkeypatch.setattr(data_connector, "_replace_dunder_methods", in_turn)
    torch.set_default_dtype(torch.float64)
    own, errors = torch.autograd._engine_run_backward, []
    first = PlainTorch()
    modules = [first, copy.deepcopy(first), copy.deepcopy(first)]

    def fit(module: LightningModule, devices: int) -> None:
        try:
            trainer(devices, max_epochs=2).fit(module, loader(), loader())
        except BaseException as error:
            errors.append(error)

    fit(modules[0], 1)
    threads = [threading.Thread(target=fit, args=(module, 2)) for module in modules[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert torch.autograd._engine_run_backward is own
    for module in modules[1:]:
        torch.testing.assert_close(module.state_dict(), first.state_dict(), atol=1e-10, rtol=0)


def test_errors_of_optimizers_reach_the_step_that_may_handle_them() -> None:
    class Handling(Manual):
        handled = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with pytest.raises(RuntimeError, match="does not require grad"):
                self.manual_backward(self.loss(batch).detach())
            with pytest.raises(ValueError, match="loss of one element"):
                self.manual_backward(self.net(batch[0]))
            return super().training_step(batch, batch_idx)

    compare_quietly = {"max_epochs": 1}
    torch.set_default_dtype(torch.float64)
    assert_same(run(Handling, 2, **compare_quietly), run(Manual, 1, **compare_quietly))


def test_what_a_step_returns_is_gathered() -> None:
    seen: list[Any] = []

    class Returning(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return {"x": batch[0], "n": len(batch[0])} if batch_idx else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)
            if batch_idx:
                torch.testing.assert_close(outputs["x"].cpu(), batch[0].cpu())

    trainer(3, max_epochs=1).fit(Returning(), loader(), loader())
    assert [output.get("n") for output in seen] == [None, 25, 3]


class SetsGradients(Manual):
    """Sets gradients itself: those of its shard, or what it makes of the batch's."""

    of_batch = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, parameters = self.optimizers(), list(self.parameters())
        optimizer.zero_grad()
        if self.of_batch:
            self.manual_backward(self.loss(batch))
            gradients = [parameter.grad * 0.5 for parameter in parameters]
        else:
            gradients = list(torch.autograd.grad(self.loss(batch), parameters))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


class SetsThoseOfTheBatch(SetsGradients):
    of_batch = True


def test_gradients_set_by_hand_have_to_be_the_same_on_every_replica() -> None:
    with pytest.raises(RuntimeError, match=r"each is of a replica's own samples"):
        run(SetsGradients, 3)
    assert_same(
        run(SetsGradients, 3, strategy={"mode": "forward"}), run(SetsGradients, 1), atol=1e-6
    )
    assert_same(run(SetsThoseOfTheBatch, 3), run(SetsThoseOfTheBatch, 1), atol=1e-6)
