"""The engine's training step: the loss and the gradients of the whole batch."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracle import devices_of, gradients
from torch import Tensor, nn

from lightning_dp.parallel.reduce import reduce_gradients
from lightning_dp.parallel.split import weighted
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

CPU = torch.device("cpu")


class Regression(nn.Module):
    """Calls `step` on the network and the batch."""

    def __init__(self, step: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.unused = nn.Linear(1, 1).double()
        self.step = step

    def training_step(self, batch: Any, *args: Any) -> Any:
        return self.step(self.net, batch)


def mean_loss(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).square().mean()


@contextmanager
def engine_of(module: nn.Module, sizes: tuple[int, ...], **options: Any) -> Iterator[StepParallel]:
    devices = devices_of(len(sizes))
    engine = StepParallel(
        module.to(devices[0]),
        devices,
        output_device=CPU,
        split=lambda n: sizes if sum(sizes) == n else weighted(n, sizes),
        **{"executor": "threads", **options},
    )
    try:
        yield engine
    finally:
        engine.close()


def train(module: nn.Module, batch: Any, sizes: tuple[int, ...], **options: Any) -> Any:
    with engine_of(module, sizes, **options) as engine:
        output = engine.train("training_step", engine.scatter(batch))
        (output["loss"] if isinstance(output, dict) else output).backward()
        return output


def assert_same_gradients(module: nn.Module, oracle: nn.Module) -> None:
    expected = gradients(oracle)
    for name, gradient in gradients(module).items():
        other = expected[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            torch.testing.assert_close(gradient, other, atol=1e-12, rtol=0)


def sum_loss(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).square().sum()


@pytest.mark.parametrize("reduction, step", [("mean", mean_loss), ("sum", sum_loss)])
@settings(max_examples=15)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
def test_any_split_gives_the_loss_and_gradients_of_the_whole_batch(
    reduction: Any, step: Any, sizes: list[int]
) -> None:
    """A parameter that no replica used keeps None."""
    batch = torch.randn(sum(sizes), 4, dtype=torch.float64)
    module, oracle = Regression(step), Regression(step)
    loss = train(module, batch, tuple(sizes), loss_reduction=reduction)
    expected = oracle.training_step(batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    assert_same_gradients(module, oracle)
    assert module.unused.weight.grad is None


def test_gradients_that_torch_conjugates_or_negates_only_as_it_reads_them() -> None:
    values = torch.complex(*torch.randn(2, 3, 4, dtype=torch.float64))
    root, twin = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    root.grad, twin.grad = values.clone(), values.conj()
    reduce_gradients([[root], [twin]])
    assert torch.equal(root.grad, 2 * values.real + 0j)


def masked_loss(net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    errors = net(batch["x"]).squeeze(1).square()
    kept = errors[batch["mask"]]
    return {"loss": kept.mean(), "num_items": len(kept), "errors": errors.detach()}


@pytest.mark.parametrize("told", ["number", "tensor", "attribute"])
def test_a_mean_over_valid_items_is_weighted_by_their_number(told: str) -> None:
    def step(net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        output = masked_loss(net, batch)
        if told == "tensor":
            output["num_items"] = torch.tensor(output["num_items"])
        elif told == "attribute":
            output["loss"].num_items = output.pop("num_items")
        return output

    # The second shard has no valid item: its own mean is NaN.
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1], dtype=torch.bool)
    batch = {"x": torch.randn(8, 4, dtype=torch.float64), "mask": mask}
    module, oracle = Regression(step), Regression(masked_loss)
    output = train(module, batch, (4, 3, 1))
    expected = oracle.training_step(batch)
    expected["loss"].backward()
    torch.testing.assert_close(output["loss"], expected["loss"])
    assert output.get("num_items") == (None if told == "attribute" else 4)
    torch.testing.assert_close(output["errors"], expected["errors"])
    assert_same_gradients(module, oracle)
    batch["mask"][:] = False  # without any valid item the loss is NaN, as on one device
    assert train(module, batch, (4, 4))["loss"].isnan()


def test_replicas_that_return_none_are_left_out() -> None:
    def step(net: nn.Module, batch: Tensor) -> Tensor | None:
        return None if batch[0, 0] < 0 else mean_loss(net, batch)

    batch = torch.ones(5, 4, dtype=torch.float64)
    batch[3:] = -1
    module, oracle = Regression(step), Regression(step)
    with pytest.warns(UserWarning, match="got None from 1 of 3. Their samples are left out"):
        train(module, batch, (2, 1, 2))
    oracle.training_step(batch[:3]).backward()
    assert_same_gradients(module, oracle)
    with engine_of(module, (2, 3)) as engine:
        assert engine.train("training_step", engine.scatter(-batch.abs())) is None


def test_a_parameter_that_one_replica_used_gets_its_gradient() -> None:
    def step(net: nn.Module, batch: Tensor) -> Tensor:
        first = net[0](batch)
        return (net[2](first) if batch[0, 0] > 0 else first).sum() / len(batch)

    batch = torch.ones(4, 4, dtype=torch.float64)
    batch[:1] = -1
    module = Regression(step)
    train(module, batch, (1, 3))
    expected = Regression(step)
    (expected.training_step(batch[:1]) / 4 + expected.training_step(batch[1:]) * 0.75).backward()
    assert_same_gradients(module, expected)


def test_gradients_accumulate_over_backwards() -> None:
    batches = torch.randn(3, 6, 4, dtype=torch.float64)
    module, oracle = Regression(mean_loss), Regression(mean_loss)
    with engine_of(module, (2, 2, 2)) as engine:
        for i, batch in enumerate(batches):
            if i == 1:  # which makes new replicas
                module.net[0].register_forward_hook(lambda *_: None)
            engine.train("training_step", engine.scatter(batch)).backward()
    for batch in batches:
        oracle.training_step(batch).backward()
    assert_same_gradients(module, oracle)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_gradient_hooks_of_parameters_see_the_sum_once(
    on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_hooks() -> tuple[Regression, list[Tensor]]:
        module, seen = Regression(mean_loss), []
        mask = torch.tensor([[0.0], [1], [1], [1], [1]], dtype=torch.float64)
        module.net[0].weight.register_hook(
            lambda gradient: (gradient * mask.to(gradient)).clamp(-0.01, 0.01)
        )
        module.net[2].weight.register_post_accumulate_grad_hook(
            lambda parameter: seen.append(parameter.grad.cpu().clone())
        )
        return module, seen

    batches = torch.randn(3, 5, 4, dtype=torch.float64)
    (module, seen), (oracle, expected) = with_hooks(), with_hooks()
    with engine_of(module, (2, 2, 1)) as engine:
        monkeypatch.setattr(engine, "on_cpu", on_cpu)
        for batch in batches:
            engine.train("training_step", engine.scatter(batch)).backward()
    for batch in batches:
        oracle.training_step(batch).backward()
    assert_same_gradients(module, oracle)
    torch.testing.assert_close(seen, expected, atol=1e-12, rtol=0)
    assert module.net[0].weight._backward_hooks


def test_backward_can_be_repeated_if_the_graph_is_kept() -> None:
    batch = torch.randn(4, 4, dtype=torch.float64)
    module, oracle = Regression(mean_loss), Regression(mean_loss)
    with engine_of(module, (2, 2)) as engine:
        loss = engine.train("training_step", engine.scatter(batch))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"inside training_step"):
            engine.train("training_step", engine.scatter(batch)).backward(create_graph=True)
    (2 * oracle.training_step(batch)).backward()
    assert_same_gradients(module, oracle)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (3.0, TypeError, "Expected training_step to return a loss tensor.*got float"),
        ({"acc": 1}, TypeError, r"got a mapping with keys \['acc'\]"),
        (torch.ones(3), ValueError, r"Expected a loss of one element, got shape \(3,\)"),
        ({"loss": torch.ones(()), "num_items": math.nan}, ValueError, "finite num_items.*nan"),
        ({"loss": torch.ones(()), "num_items": -1}, ValueError, "num_items of at least 0.*-1"),
    ],
)
def test_outputs_that_are_no_loss_are_refused(
    output: Any, error: type[Exception], message: str
) -> None:
    module = Regression(lambda net, batch: output)
    with engine_of(module, (2, 2)) as engine, pytest.raises(error, match=message):
        engine.train("training_step", engine.scatter(torch.randn(4, 4)))


# Elsewhere one backward runs through all graphs, and PyTorch does not say in whose it failed.
@pytest.mark.parametrize("on", ["cpu"], indirect=True)
def test_an_error_in_backward_names_replica_and_samples() -> None:
    def step(net: nn.Module, batch: Tensor) -> Tensor:
        loss = mean_loss(net, batch)
        if batch[0, 0] > 0:
            loss.register_hook(lambda gradient: 1 / 0)
        return loss

    batch = -torch.ones(5, 4, dtype=torch.float64)
    batch[2:] = 1
    with engine_of(Regression(step), (2, 3)) as engine:
        loss = engine.train("training_step", engine.scatter(batch))
        note = r"in replica 1 on cpu:1, backward, samples 2 to 4 of 5"
        with pytest.raises(ZeroDivisionError, match=note):
            loss.backward()


def test_a_batch_with_nothing_to_cut_runs_on_the_root_alone() -> None:
    module = Regression(
        lambda net, batch: net(batch["scale"] * torch.ones_like(net[0].weight)).mean()
    )
    with (
        engine_of(module, (1, 1)) as engine,
        pytest.warns(UserWarning, match="runs on the root device alone"),
    ):
        shards = engine.scatter({"scale": 2.0})
    assert shards.sizes == (1, 0)
    engine.train("training_step", shards).backward()
    assert module.net[0].weight.grad is not None
