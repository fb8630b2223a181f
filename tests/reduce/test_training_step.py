"""The engine's training step: the loss and the gradients of the whole batch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_kinds import not_on_sim
from support.oracle import assert_equal_trees, gradients
from support.step_twins import step_engine
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("on")

CLOSE = {"atol": 1e-12, "rtol": 1e-12}


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


def train(module: nn.Module, batch: Any, sizes: tuple[int, ...], **options: Any) -> Any:
    with step_engine(module, sizes, **options) as engine:
        output = engine.train("training_step", batch)
        (output["loss"] if isinstance(output, dict) else output).backward()
        return output


def assert_same_gradients(module: nn.Module, oracle: nn.Module) -> None:
    assert_equal_trees(gradients(module), gradients(oracle), "gradients", **CLOSE)


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
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert_same_gradients(module, oracle)
    assert module.unused.weight.grad is None


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
    with step_engine(module, (2, 3)) as engine:
        assert engine.train("training_step", -batch.abs()) is None


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


def test_a_backward_that_is_repeated_needs_the_graph_and_makes_none() -> None:
    batch = torch.randn(4, 4, dtype=torch.float64)
    with step_engine(Regression(mean_loss), (2, 2)) as engine:
        loss = engine.train("training_step", batch)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"inside training_step"):
            engine.train("training_step", batch).backward(create_graph=True)


def test_buffers_that_are_trained_are_refused() -> None:
    module = Regression(mean_loss)
    module.register_buffer("scale", None)
    message = r"buffers without gradients, got \['scale'.*parameters"
    with step_engine(module, (2, 2)) as engine, pytest.raises(ValueError, match=message):
        module.scale = torch.ones_like(module.net[0].bias, requires_grad=True)
        engine.train("training_step", torch.randn(4, 4))


@not_on_sim  # which has no tensors of forward-mode derivatives
# The first derivative of this kind makes torch compile functions for it.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_derivatives_in_forward_mode_are_refused_in_threads_and_right_in_order() -> None:
    def step(net: nn.Module, batch: Tensor) -> Tensor:
        out, slope = torch.func.jvp(net, (batch,), (torch.ones_like(batch),))
        return (out.square() + slope.square()).mean()

    batch = torch.randn(9, 4, dtype=torch.float64)
    module, oracle = Regression(step), Regression(step)
    with pytest.raises(RuntimeError, match=r"torch.func.jvp.*executor=\"inorder\""):
        train(module, batch, (3, 3, 3))
    train(module, batch, (3, 3, 3), executor="inorder")
    oracle.training_step(batch).backward()
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
    with step_engine(module, (2, 2)) as engine, pytest.raises(error, match=message):
        engine.train("training_step", torch.randn(4, 4))


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
    with step_engine(Regression(step), (2, 3)) as engine:
        loss = engine.train("training_step", batch)
        note = r"in replica 1 on cpu:1, backward, samples 2 to 4 of 5"
        with pytest.raises(ZeroDivisionError, match=note):
            loss.backward()


def test_a_batch_with_nothing_to_cut_runs_on_the_root_alone() -> None:
    module = Regression(
        lambda net, batch: net(batch["scale"] * torch.ones_like(net[0].weight)).mean()
    )
    with (
        step_engine(module, (1, 1)) as engine,
        pytest.warns(UserWarning, match="runs on the root device alone"),
    ):
        shards = engine.scatter({"scale": 2.0})
    assert shards.sizes == (1, 0)
    engine.train("training_step", shards).backward()
    assert module.net[0].weight.grad is not None
