"""What counts samples is learnt from shards of unequal sizes, and never from what divides."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Classifier, assert_equal_trees, devices_of, loader, samples, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.batch import SampleDims, StepDims, gather, judge
from lightning_dp.parallel.batch.sample_dims import tells
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.split.arithmetic import even, reordered, unequal
from lightning_dp.parallel.step import StepParallel

pytestmark = pytest.mark.usefixtures("on")

Shapes = list[tuple[int, ...]]


@st.composite
def leaves(draw: Any) -> tuple[int, int, tuple[int, ...], int | None, int]:
    """K, samples per replica, constant dims (which may equal them), the dim of samples, rows."""
    k, n = draw(st.integers(2, 5)), draw(st.integers(2, 6))
    lengths = st.sampled_from([1, n - 1, n, n + 1, k, 2 * n, k * n])
    constant = tuple(draw(st.lists(lengths, min_size=1, max_size=3)))
    place = draw(st.none() | st.integers(0, len(constant)))
    return k, n, constant, place, draw(st.integers(1, 3))


def shapes_of(sizes: tuple[int, ...], constant: Any, place: int | None, rows: int) -> Shapes:
    if place is None:
        return [constant] * len(sizes)
    return [(*constant[:place], rows * size, *constant[place:]) for size in sizes]


@given(leaves(), st.sampled_from([0, 1, -1]))
def test_what_follows_the_sizes_counts_samples_and_nothing_else(case: Any, dim: int) -> None:
    k, n, constant, place, rows = case
    dims, sizes = StepDims(dim), unequal((n,) * k)
    verdict = dims.rows(("output",), shapes_of(sizes, constant, place, rows), sizes)
    expected = ("constant",) if place is None else ("rows", place, rows)
    assert verdict[: len(expected)] == expected and verdict.is_sure
    again = dims.rows(("output",), shapes_of((n,) * k, constant, place, rows), (n,) * k)
    assert again == verdict


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_sizes_become_unequal_by_as_little_as_can_be(sizes: list[int], least: int) -> None:
    new, active = unequal(tuple(sizes), least), [n for n in sizes if n]
    assert sum(new) == sum(sizes) and len(new) == len(sizes)
    assert all(after == 0 for before, after in zip(sizes, new, strict=True) if before == 0)
    if tells(sizes) or len(active) < 2:
        assert new == tuple(sizes)
        return
    assert tells(new) or (len(active) == 2 and active[0] <= least)
    if active[0] > least:
        assert max(new) == active[0] + 1 and sum(map(bool, new)) == len(active)
    if min(active) >= least:
        assert min(n for n in new if n) >= least


def test_samples_in_another_order_change_places_as_little() -> None:
    parts = reordered([[0, 5], [1, 4], [2, 3]], (3, 2, 1))
    assert parts == [[0, 3, 5], [1, 4], [2]]


class Series(nn.Module):
    """Returns what a case says of each batch."""

    def __init__(self, step: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.step = step

    def predict_step(self, batch: Tensor) -> Any:
        return self.step(batch)

    def forward(self, batch: Tensor) -> Any:
        return self.step(batch)


CASES: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda x: x,
    "series": lambda x: x[:, None, :1].repeat(1, 12, 3),
    "series first": lambda x: x[:, :1].repeat(1, 4).T,
    "as many series as samples": lambda x: {"y": [x[:, None].repeat(1, 4, 1), x.mean(1)]},
    "a list of samples": lambda x: {"names": [f"{v:.3f}" for v in x[:, 0].tolist()]},
    "a tuple of two": lambda x: (x, x.sum(1)),
    "counts": lambda x: {"n": len(x), "classes": 4, "index": 2},
    "constants": lambda x: {"x": x, "eye": torch.eye(4, device=x.device), "names": list("abcd")},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_outputs_are_those_of_one_device(name: str, k: int) -> None:
    """Batches of which every shard is as long as something else in the output."""
    net = Series(CASES[name]).to(devices_of(1)[0])
    options: Any = {"output_device": devices_of(1)[0], "split": lambda n: even(n, k)}
    engine = StepParallel(net, devices_of(k), **options)
    for n in (4, 3, 12, 2, 4):
        batch = torch.randn(n * k, 5).to(devices_of(1)[0])
        shards = engine.scatter(batch, dims=engine.dims["predict_step", False])
        result = engine.evaluate("predict_step", shards)
        assert_equal_trees(result, CASES[name](batch), "result", atol=0, rtol=0)
    engine.close()


def test_only_the_first_batch_of_a_kind_of_step_is_cut_unequally() -> None:
    engine = StepParallel(
        Series(lambda x: x).to(devices_of(1)[0]),
        devices_of(3),
        output_device=devices_of(1)[0],
        split=lambda n: even(n, 3),
    )
    sizes = []
    for name in ("predict_step", "predict_step", "forward", "predict_step"):
        dims = engine.dims[name, False]
        shards = engine.scatter(torch.zeros(9, 2).to(devices_of(1)[0]), dims=dims)
        engine.evaluate(name, shards)
        sizes.append(engine.last_sizes)
    assert sizes == [(4, 3, 2), (3, 3, 3), (4, 3, 2), (3, 3, 3)]
    engine.close()


def test_where_scalars_are_stacked_shards_stay_equal() -> None:
    """Their mean, as of the losses that nn.DataParallel gives, is right for equal shards alone."""
    net = Series(lambda x: (x.mean(), x, x.new_ones(2), x.T)).to(devices_of(1)[0])
    split = lambda n: even(n, 3)
    engine = ForwardParallel(net, devices_of(3), output_device=devices_of(1)[0], split=split)
    for n in (8, 9, 9):
        batch = torch.randn(n, 5).to(devices_of(1)[0])
        with engine.spreading():
            means, rows, constant, columns = net(batch)
        assert engine.last_sizes == even(n, 3)
        assert (
            means.shape == (3,)
            and torch.equal(rows, batch)
            and torch.equal(constant, batch.new_ones(2))
        )
        assert torch.equal(columns, batch.T), "as learnt from the first batch"
    torch.testing.assert_close(means.mean(), batch.mean())
    engine.close()


def test_what_comes_later_is_said_and_asks_for_another_batch() -> None:
    dims = SampleDims(0, None, is_told=False)["step", False]
    dims.has_seen((2, 1))
    assert not dims.asks
    late = [{"x": torch.ones(3, 3)}, {"x": torch.zeros(3, 3)}]
    with pytest.warns(UserWarning, match=r"output\['x'\].*along dim 0.*gather_overrides"):
        assert gather(late, "cpu", sizes=[3, 3], dims=dims)["x"].shape == (6, 3)
    assert dims.asks
    dims.has_seen((4, 2))
    with pytest.warns(UserWarning, match="no rows of samples, so they are averaged"):
        told = StepDims()
        result = gather(late, "cpu", sizes=[4, 2], dims=told)["x"]
    torch.testing.assert_close(result, torch.full((3, 3), 4 / 6))
    assert gather(late, "cpu", sizes=[3, 3], dims=told)["x"].shape == (3, 3), "said once"


def test_rows_of_tokens_are_joined_and_said() -> None:
    dims = StepDims()
    outputs = [torch.arange(2 * n * 3).view(2 * n, 3) for n in (3, 1)]
    with pytest.warns(UserWarning, match=r"2 rows for each.*the rows of a sample are together"):
        joined = gather(outputs, "cpu", sizes=[3, 1], dims=dims, order=[[0, 2, 3], [1]])
    expected = torch.cat([outputs[0][:2], outputs[1], outputs[0][2:]])
    assert torch.equal(joined, expected)


def test_a_length_that_once_varied_is_no_constant() -> None:
    assert judge([(5, 4), (5, 4)], (3, 1), 0, "varies").how == "varies"
    dims = StepDims()
    for numbers, sizes, adds_up in [((5, 3), (3, 1), True), ((4, 4), (2, 2), True)]:
        assert dims.counts(("n",), numbers, sizes) is adds_up
    assert dims.counts(("constant",), (4, 4), (3, 1)) is False
    assert dims.counts(("unknown",), (4, 4), (2, 2)) is None and dims.asks


class Collecting(Classifier):
    """Collects what is no row of a sample in lists on self."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[Tensor] = []
        self.matrices: list[Tensor] = []
        self.rows: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none").detach()
        self.pairs.append(torch.stack([losses.sum(), losses.new_tensor(len(x))]))
        guess = self.net(x).argmax(1)
        self.matrices.append(torch.bincount(3 * y + guess, minlength=9).view(3, 3))
        self.rows.append(losses)
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return {
            "series": logits[:, None].repeat(1, 12, 1),
            "matrix": logits.T @ logits,
            "tokens": logits[:, None].repeat(1, 4, 1).view(-1, 3),
        }


def collected(k: int, n: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Collecting()
    strategy = DataParallelStrategy(**options) if k > 1 else "auto"
    job = trainer(k, strategy)
    data = loader(4 * n, n)
    job.validate(module, data, verbose=False)
    return [module.pairs, module.matrices, module.rows, job.predict(module, data)]


@pytest.mark.parametrize(("k", "n"), [(3, 9), (3, 6), (4, 12), (2, 6), (3, 36), (3, 3)])
def test_sums_and_matrices_in_lists_are_those_of_one_device(k: int, n: int) -> None:
    torch.set_default_dtype(torch.float64)
    overrides = {"pairs": "sum", "matrix": "sum"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"self\.matrices.* added up")
        warnings.filterwarnings("ignore", message=r"output\['tokens'\].* have 4 rows for each")
        several = collected(k, n, gather_overrides=overrides)
    assert_equal_trees(several, collected(1, n), "collected", atol=1e-10, rtol=0)


def test_what_has_no_samples_is_named_with_its_way_out() -> None:
    with pytest.warns(UserWarning) as caught:
        collected(3, 9)
    texts = [str(w.message) for w in caught if "gather_overrides" in str(w.message)]
    names = ["self.matrices", "self.pairs", "output['matrix']", "output['tokens']"]
    assert [text.split(": ")[0] for text in texts] == names
    assert [("no rows of samples" in text) for text in texts] == [True, True, True, False]


class Weighted(Metric):
    """A sum over samples, each with the weight of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sum", torch.tensor(0.0, dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("calls", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor, y: Tensor, weights: Tensor, classes: int) -> None:
        assert weights.shape == (3,) and classes == 3
        self.sum = self.sum + (weights[y] * x).sum()
        self.calls = self.calls + 1

    def compute(self) -> Tensor:
        return self.sum / self.calls


class Measuring(Classifier):
    """Passes to a metric, and to log, what is as long as every shard."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Weighted()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.metric.update(x[:, 0], y, torch.arange(3.0, device=x.device), 3)
        self.log("metric", self.metric)
        self.log("mean", x.mean(), batch_size=3)


@pytest.mark.parametrize("sizes", [(9, 9, 9), (9, 3, 9), (6, 9, 2)])
def test_arguments_of_metrics_and_logs_may_be_as_long_as_every_shard(
    sizes: tuple[int, ...],
) -> None:
    torch.set_default_dtype(torch.float64)
    positions = iter(range(sum(sizes)))
    batches = [[next(positions) for _ in range(n)] for n in sizes]
    results = [
        trainer(k).validate(
            Measuring(), DataLoader(samples(sum(sizes)), batch_sampler=batches), verbose=False
        )
        for k in (3, 1)
    ]
    assert_equal_trees(*results, "logged", atol=1e-10, rtol=0)
