"""Samples in relation to a statistic of their shard are told, where a step is traced for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from oracle import ByHand, Classifier, assert_same, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from lightning_dp import DataParallel
from lightning_dp.parallel.additive.findings import Related
from lightning_dp.parallel.additive.relations import related
from lightning_dp.parallel.additive.traces import NO_NUMBER, Trace
from lightning_dp.parallel.step import StepParallel

TOLD = "sub of samples and of mean over all of them, which has no gradient"


class Centred(Classifier):
    """As people write it who know one device."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x - x.mean(0), y))


class CentredByHand(ByHand, Centred):
    pass


class CentredBefore(Classifier):
    """The whole batch is centred."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return batch if self.trainer.predicting else [x - x.mean(0), y]


@pytest.mark.usefixtures("on", "one_thread")
@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("make", [Centred, CentredByHand])
def test_it_is_told_once_in_a_fit(make: Any, executor: str) -> None:
    with pytest.warns(UserWarning, match=TOLD) as records:
        run(make, 3, strategy={"executor": executor})
    assert sum(TOLD in str(record.message) for record in records) == 1


@pytest.mark.usefixtures("on", "one_thread")
def test_what_it_advises_is_as_on_one_device() -> None:
    expected = run(Centred, 1)
    assert_same(run(CentredBefore, 3), expected, atol=1e-5)
    assert_same(run(Centred, 3, strategy={"mode": "forward"}), expected, atol=1e-5)


# --- which steps are traced -----------------------------------------------------------------------


class Net(nn.Linear):
    """Notes in which of its steps somebody listens to torch's functions."""

    num_items = False

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.heard: list[bool] = []

    def training_step(self, x: Tensor) -> Any:
        self.heard.append(_is_traced())
        loss: Any = self(x).square().mean()
        return {"loss": loss, "num_items": len(x)} if self.num_items else loss


def _is_traced() -> bool:
    return any(isinstance(mode, Trace) for mode in _get_current_function_mode_stack())


def heard(net: Net, count: int, n: int = 5, **options: Any) -> list[int]:
    """In which of so many batches replicas were traced."""
    cpu = torch.device("cpu")
    split = {"split": lambda n: (n - n // 2, n // 2), "executor": "inorder"}
    engine = StepParallel(net, [cpu] * 2, output_device=cpu, **{**split, **options})
    traced = []
    with closing(engine):
        for i in range(count):
            net.heard.clear()
            engine.train("training_step", torch.randn(n, 4))
            if any(net.heard):
                traced.append(i + 1)
    return traced


def test_the_first_the_16th_and_the_256th_batch_are_traced() -> None:
    assert heard(Net(), 260) == [1, 16, 256]


def test_batches_that_are_looked_at_are_cut_unequally() -> None:
    assert heard(Net(), 20, n=6) == [1, 16]


def test_where_losses_are_to_be_sums_what_is_logged_is_traced_once() -> None:
    assert heard(Net(), 20, loss_reduction="sum") == [1]


def test_a_step_that_tells_its_items_is_traced_once() -> None:
    net = Net()
    net.num_items = True
    assert heard(net, 20) == [1]


def test_a_module_that_compiles_is_not_traced() -> None:
    net = Net()
    net.compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    assert not heard(net, 2)


def test_after_an_error_nothing_is_heard() -> None:
    class Failing(Net):
        def training_step(self, x: Tensor) -> Any:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        heard(Failing(), 1)
    assert not _is_traced()


# --- calls that are spread ------------------------------------------------------------------------


class Called(nn.Module):
    """What its `forward` does is up to a test."""

    def __init__(self, does: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.does = nn.Linear(4, 4), nn.BatchNorm1d(4), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def told_of(net: nn.Module, counts: tuple[int, ...] = (10, 10, 7)) -> tuple[Tensor, list[str]]:
    """What the last call returns in place of its batch, and what is told."""
    torch.manual_seed(1)
    spread = DataParallel(net, device_ids=["cpu"] * 3)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        result = [spread(torch.randn(n, 4)) for n in counts][-1]
    return result, [str(record.message) for record in records]


def alone(net: nn.Module, counts: tuple[int, ...] = (10, 10, 7)) -> Tensor:
    torch.manual_seed(1)
    result: Tensor = [net(torch.randn(n, 4)) for n in counts][-1]
    return result


def check_that_a_fit_is_told(make: Any, text: str) -> None:
    """Once; and it is not one device's."""
    with pytest.warns(UserWarning) as records:
        several = run(make, 3)
    told = [str(each.message) for each in records if "training_step: expected" in str(each.message)]
    assert [text in message for message in told] == [True]
    one = run(make, 1)
    assert not torch.allclose(several.module.net[0].weight.cpu(), one.module.net[0].weight)


def check_that_a_call_is_told(does: Callable[[Any, Tensor], Any], text: str) -> None:
    """Once; and it is not one device's."""
    result, told = told_of(Called(does))
    assert [message.startswith("forward: expected outputs") for message in told] == [True]
    assert text in told[0]
    assert not torch.allclose(result, alone(Called(does)), rtol=1e-3)


def check_that_a_call_is_not_told(does: Callable[[Any, Tensor], Any]) -> None:
    """It is one device's."""
    result, told = told_of(Called(does))
    assert not told
    torch.testing.assert_close(result, alone(Called(does)))


MIXING: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "data": (lambda net, x: net.layer(x - x.mean(0)), "sub of samples and of mean over "),
    "features": (lambda net, x: net.layer(x) - net.layer(x).mean(0), "sub of samples and of mean"),
    "scale": (lambda net, x: net.layer(x) / net.layer(x).std(0), "div of samples and of std over"),
    "pairs": (lambda net, x: net.layer(x) @ (x.T @ x), "matmul of samples and of matmul over all"),
}
OF_EACH: dict[str, Callable[[Any, Tensor], Any]] = {
    "layer": lambda net, x: net.layer(x).relu(),
    "rows": lambda net, x: net.layer(x) - net.layer(x).mean(1, keepdim=True),
    "attention": lambda net, x: (net.layer(x)[:, :, None] * x[:, None]).softmax(-1).sum(-1),
    "weights": lambda net, x: net.layer(x) * net.layer.weight.norm(),
    "forces": lambda net, x: _gradient(net.layer(x := x.requires_grad_()).square().sum(), x),
}


def _gradient(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("name", MIXING)
def test_a_call_whose_samples_depend_on_each_other_is_told_and_is_not_one_devices(
    name: str,
) -> None:
    check_that_a_call_is_told(*MIXING[name])


@pytest.mark.parametrize("name", OF_EACH)
def test_a_call_of_which_nothing_is_told_is_as_on_one_device(name: str) -> None:
    check_that_a_call_is_not_told(OF_EACH[name])


@pytest.mark.parametrize("converts", [False, True])
def test_batch_norm_is_not_told(converts: bool) -> None:
    net: nn.Module = Called(lambda net, x: net.norm(net.norm(x)))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if converts else net
    assert not told_of(net)[1]


class CentredForward(Classifier):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x - x.mean(0))


@pytest.mark.usefixtures("on", "one_thread")
def test_forward_mode_tells_it_of_the_modules_forward() -> None:
    with pytest.warns(UserWarning, match="^forward: expected outputs") as records:
        run(CentredForward, 3, strategy={"mode": "forward"})
    told = [str(each.message) for each in records if "forward: expected" in str(each.message)]
    assert len(told) <= len(("fit", "validate", "test", "predict")) and len({*told}) == 1


# --- traces ---------------------------------------------------------------------------------------


def traced(step: Callable[[Any], Any], shard: Any) -> tuple[Trace, Any]:
    with Trace(shard) as trace:
        return trace, step(shard)


def found(step: Callable[[Tensor], Tensor], sizes: tuple[int, ...] = (3, 2)) -> Related | None:
    torch.manual_seed(0)
    traces, losses = zip(*[traced(step, torch.randn(size, 4)) for size in sizes], strict=True)
    return related(traces, [[loss] for loss in losses], sizes)


def test_a_traced_step_computes_what_it_would() -> None:
    def step(x: Tensor) -> Tensor:
        x = F.dropout(x.clone(), 0.5)
        x[0] = x.sort(0).values[0]
        x -= x.mean(0)
        return torch.cat([x.T, x.new_ones(4, 1)], 1).logsumexp(0).sum()

    x = torch.randn(3, 4)
    torch.manual_seed(1)
    expected = step(x)
    torch.manual_seed(1)
    assert torch.equal(traced(step, x)[1], expected)


def test_what_does_not_come_of_the_shard_has_no_number() -> None:
    weight = nn.Parameter(torch.ones(4))
    x = torch.ones(3, 4)
    with Trace({"x": x, "name": "x"}) as trace:
        alone = weight.exp().sum()
        weight.data.add_(x.sum(0))
        together = alone * x
    assert [trace.number_of(own) for own in (x, weight, alone)] == [0, NO_NUMBER, NO_NUMBER]
    assert trace.number_of(together) > 0
    assert [call.name for call in trace.calls if call.takes[-1] == 0] == ["sum", "mul"]


def test_what_is_packed_is_of_the_shard() -> None:
    def step(packed: Any) -> Tensor:
        return nn.LSTM(4, 2)(packed._replace(data=packed.data - packed.data.mean(0)))[0].data.sum()

    def packed(lengths: list[int]) -> Any:
        return nn.utils.rnn.pack_sequence([torch.randn(length, 4) for length in lengths])

    traces, losses = zip(*[traced(step, packed(own)) for own in ([5, 3, 2], [4, 1])], strict=True)
    assert related(traces, [[loss] for loss in losses], (3, 2)) == Related("mean", "sub")


def test_a_tensor_that_is_gone_leaves_its_number_to_nobody() -> None:
    with Trace(x := torch.ones(3)) as trace:
        for _ in range(50):
            made = x + 1
            known = trace.number_of(made)
            del made
            assert trace.number_of(torch.ones(3)) == NO_NUMBER
    assert known == 50


def test_functions_that_are_compiled_stay_whole() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def centred(x: Tensor) -> Tensor:
        return (x - x.mean(0)).square()

    x = torch.randn(3, 4)
    trace, result = traced(lambda x: centred(x).sum(), x)
    assert torch.equal(result, centred(x).sum())
    assert not trace.calls or trace.calls[-1].name == "sum"


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.stack([row - x.mean(0) for row in x]).sum(),
        lambda x: torch.tensor(float((x - x.mean(0)).sum())),
        lambda x: torch.ones(()),
        lambda x: (x.square() if x.max() > 2 else x.abs().sqrt()).sum(),
    ],
    ids=["as often as there are samples", "the host's alone", "of nothing", "a way of its own"],
)
def test_where_nobody_knows_nothing_is_told(step: Any) -> None:
    assert found(step) is None


def test_shards_of_equal_sizes_tell_nothing() -> None:
    assert found(lambda x: (x - x.mean(0)).sum(), (3, 3)) is None


def test_a_statistic_that_is_written_to_after_its_use_is_told() -> None:
    def step(x: Tensor) -> Tensor:
        mean = x.mean(0)
        centred = x - mean
        mean.zero_()
        return centred.sum()

    assert found(step) == Related("mean", "sub")


def test_a_statistic_that_tells_which_elements_are_used_is_not_told() -> None:
    """As experts are picked that have any tokens."""
    experts = torch.randn(4, 2)
    assert found(lambda x: (x @ experts[(x > 9).sum(0)]).sum()) is None
    assert found(lambda x: x.square()[:, x.abs().sum(0).argmax()].sum()) is None


def test_where_the_samples_of_each_expert_end_is_not_told() -> None:
    """As experts get theirs in one call, in the order of experts."""
    weights = torch.randn(2, 4, 8)

    def mixed(x: Tensor) -> Tensor:
        expert = (x[:, 1] > 0).long()
        order = expert.argsort()
        ends = torch.histc(expert.float(), 2, 0, 1).cumsum(0).to(torch.int32)
        return F.grouped_mm(x[order], weights, offs=ends).square().mean()

    assert found(mixed) is None


def test_a_statistic_in_which_shapes_or_dtypes_are_all_that_is_used_is_not_told() -> None:
    assert found(lambda x: (x.type_as(x.sum(0)) - torch.zeros_like(x.sum(0))).sum()) is None
    mean = Related("mean", "sub")
    assert found(lambda x: (x - x.mean(0).expand_as(x).to(x)).sum()) == mean


def test_statistics_of_nested_and_wrapped_tensors_are_passed_over() -> None:
    def nested(x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x, x.flip(1)[1:]], layout=torch.jagged)
        return (rows * 2).values().sum()

    assert found(nested) is None
    assert found(lambda x: torch.func.vmap(lambda row: (row * x.sum(0)).sum())(x).sum()) is None
    assert found(lambda x: torch.func.grad(lambda row: (row * x).sum())(x).sum()) is None


@pytest.mark.parametrize(
    ("step", "statistic"),
    [
        (lambda x: (x - x.to_sparse().sum(0).to_dense()).sum(), "sum"),
        (lambda x: (x - torch.complex(x, x).mean(0)).real.sum(), "mean"),
        (lambda x: (x - x.to(torch.bfloat16).mean(0)).sum(), "mean"),
        (
            lambda x: (x.mean(1)[:, None, None] - (x.T.repeat(50, 1) @ x.repeat(1, 50))).sum(),
            "matmul",
        ),
        (lambda x: x.sum() - x.to("meta").sum().new_zeros((), device="cpu"), None),
    ],
    ids=["sparse", "complex", "bfloat16", "large", "meta"],
)
def test_statistics_of_any_kind_can_be_compared(step: Any, statistic: str | None) -> None:
    assert found(step) == (statistic and Related(statistic, "sub"))


def test_a_fit_is_the_same_whether_it_is_traced_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> Tensor:
        torch.manual_seed(0)
        net, cpu = Net(), torch.device("cpu")
        engine = StepParallel(net, [cpu] * 2, output_device=cpu, split=lambda n: (3, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with closing(engine), warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                optimizer.zero_grad()
                engine.train("training_step", torch.randn(5, 4)).backward()
                optimizer.step()
        return net.weight.detach()

    expected = weights()
    monkeypatch.setattr("lightning_dp.parallel.additive.OwnMeans.is_traced", lambda *_: False)
    assert torch.equal(weights(), expected)
