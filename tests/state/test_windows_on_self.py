"""What a step does to lists, deques and dicts on self: afterwards they are as on one device."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from oracle import Classifier, assert_same, run, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.scatter.shards import Shards
from lightning_dp.state.containers import Merge
from lightning_dp.state.items import copied, refill

SIZES = (3, 0, 2, 1)
EXACT = {"atol": 0.0, "rtol": 0.0}

Step = Callable[[Any, Tensor], Any]


def joined(own: Any, step: Step, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """Does a step to a container as replicas do; where the root has no samples, to copies alone.

    Returns:
        The keys of entries that they have changed to different values.
    """
    parts = [part if len(part) else None for part in samples(sum(sizes)).split(sizes)]
    before = copied(own)
    merge = Merge(torch.device("cpu"), Shards(sizes, parts))
    after = [own if k == 0 else copied(before) for k, n in enumerate(sizes) if n]
    for container, part in zip(after, (part for part in parts if part is not None), strict=True):
        step(container, part)
    return [path for path, _ in merge.into((0, "own"), before, after, own)]


def samples(n: int) -> Tensor:
    return torch.arange(2.0 * n).reshape(n, 2)


def plain(container: Any) -> Any:
    """Tensors as lists, so that containers can be compared as they are."""
    if isinstance(container, dict):
        return {key: plain(value) for key, value in container.items()}
    if isinstance(container, list | deque):
        return [plain(value) for value in container]
    return container.tolist() if isinstance(container, Tensor) else container


APPEND: Step = lambda items, x: items.append(x)
EXTEND: Step = lambda items, x: items.extend(x)
FORGET: Step = lambda items, x: [items.popleft() for _ in range(min(1, len(items)))]
CLEAR: Step = lambda items, x: items.clear()
OPS = st.lists(st.sampled_from([APPEND, FORGET, CLEAR]), max_size=5)


@given(
    st.lists(
        st.sampled_from([[APPEND], [FORGET], [CLEAR], [EXTEND], [FORGET, APPEND]]), max_size=6
    ),
    st.sampled_from([None, 2, 3, 8]),
    st.sampled_from([SIZES, (0, 4, 2), (6,), (0, 1), (2, 3)]),
)
def test_any_steps_leave_what_one_device_has(
    steps: list[list[Step]], maxlen: int | None, sizes: tuple[int, ...]
) -> None:
    several: deque[Any] = deque(["old", "older"], maxlen)
    one: deque[Any] = deque(["old", "older"], maxlen)
    for ops in steps:
        joined(several, lambda items, x, ops=ops: [op(items, x) for op in ops], sizes)
        for op in ops:
            op(one, samples(sum(sizes)))
        assert plain(several) == plain(one) and several.maxlen == maxlen


@given(st.integers(0, 5), st.integers(0, 2))
def test_a_window_that_slides(length: int, more: int) -> None:
    """A list that forgets its first items as it gets new ones."""

    def slide(items: list[Any], x: Tensor) -> None:
        items.append(x)
        del items[: max(0, len(items) - length)]

    several: list[Any] = ["old"] * 2
    one = list(several)
    for _ in range(length + more):
        joined(several, slide)
        slide(one, samples(sum(SIZES)))
        assert plain(several) == plain(one)


def test_containers_in_containers() -> None:
    def step(items: Any, x: Tensor) -> None:
        items["windows"][0].append(x)
        items["by name"].setdefault("new", []).append(x)
        items["last"][-1].append(x)

    several = {"windows": [deque(maxlen=2)], "by name": {"old": [1]}, "last": deque([[], []])}
    one = copied(several)
    inner = several["windows"][0]
    for _ in range(3):
        joined(several, step)
        step(one, samples(sum(SIZES)))
    assert plain(several) == plain(one)
    assert several["windows"][0] is inner and inner.maxlen == 2


@pytest.mark.parametrize("sizes", [SIZES, (0, 4, 2)])
def test_entries_that_were_changed_are_the_first_replicas(sizes: tuple[int, ...]) -> None:
    slots, counts = [0, "kept", 0], {"steps": 0, "samples": 0, "gone": 1}

    def set_slot(items: list[Any], x: Tensor) -> None:
        items[0] += 1

    def count(items: dict[str, int], x: Tensor) -> None:
        items["steps"] += 1
        items["samples"] += len(x)
        items.pop("gone")

    assert joined(slots, set_slot, sizes) == [] and slots == [1, "kept", 0]
    assert joined(counts, count, sizes) == [(0, "own", "samples")]
    assert counts == {"steps": 1, "samples": max(sizes)}


@given(OPS)
def test_what_was_done_can_be_undone(ops: list[Step]) -> None:
    own = deque([["a"], "b", {"c": [1]}], maxlen=4)
    before, inner = copied(own), own[0]
    for op in ops:
        op(own, samples(2))
    inner.append("more")
    refill(own, before)
    assert own == before and own.maxlen == 4


class Remembering(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.window: deque[Tensor] = deque(maxlen=2)
        self.labels: deque[int] = deque()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.window.append(loss.detach())
        self.labels.extend(batch[1].tolist())
        self.log("window", torch.stack([x.to(loss) for x in self.window]).mean())
        return loss


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("options", [{}, {"weights": [0, 2, 1]}, {"split": "chunk"}], ids=str)
def test_a_training_with_a_window_of_losses(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    several = run(Remembering, 3, strategy=options, max_epochs=2)
    one = run(Remembering, 1, max_epochs=2)
    assert_same(several, one)
    window = [[float(x) for x in job.module.window] for job in (several, one)]
    assert window[0] == pytest.approx(window[1], abs=1e-12)
    assert several.module.labels == one.module.labels


class Recording(LightningModule):
    """Collects results of samples, as detection and retrieval do."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self.by_kind: dict[str, list[Any]] = {"all": []}
        self.parts: tuple[list[Any], deque[Any]] = ([], deque())
        self.pairs: list[Any] = []

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        for number in batch.tolist():
            self.results.append({"id": number, "boxes": [number, [number]]})
            self.by_kind["all"].append({"id": number})
            self.parts[0].append([number])
            self.parts[1].append({"id": number})
            self.pairs.append((number, {"id": [number]}))


@pytest.mark.parametrize("k", [2, 3])
def test_results_of_samples_stay_as_they_are_in_later_steps(k: int) -> None:
    several, one = Recording(), Recording()
    data = DataLoader(torch.arange(23), batch_size=5)
    trainer(k, DataParallelStrategy()).test(several, data, verbose=False)
    trainer(1, "auto").test(one, data, verbose=False)
    assert [result["id"] for result in one.results] == list(range(23))
    for name in ("results", "by_kind", "parts", "pairs"):
        assert getattr(several, name) == getattr(one, name), name
