"""Batches travel to accelerators while these compute, and nobody can tell but by the time.

That a stream waits for what it reads, strict simulated devices see; that nothing waits longer than
it must, virtual time shows.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interrupts import Tracer
from lightning.pytorch import LightningDataModule
from oracle import ByHand, Classifier, assert_same, devices_of, run, trainer
from places import on_accelerators, on_separate
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import DataParallel
from lightning_dp.parallel.contexts import Surroundings
from lightning_dp.parallel.links import Ahead, ahead
from lightning_dp.parallel.split import Plan
from lightning_dp.parallel.step import StepParallel, TrainingStep

pytestmark = [on_accelerators, pytest.mark.usefixtures("on")]
sim_only = pytest.mark.sim_only

BATCH, BATCHES = 7, 6  # of one size, after which comes one of a single sample


@pytest.fixture(autouse=True)
def arrived(on: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[torch.device]]:
    """How many batches have come to each device so far; also small ones may."""
    counts: Counter[torch.device] = Counter()
    take = ahead._Room.take

    def spy(room: Any, tensors: Any) -> Any:
        ready = take(room, tensors)
        counts[room._device] += ready is not None
        return ready

    monkeypatch.setattr(ahead, "LEAST_BYTES", 0)
    monkeypatch.setattr(ahead._Room, "take", spy)
    yield counts
    for device in devices_of(3):
        torch.accelerator.synchronize(device)


# --- As one device would -----------------------------------------------------------------------


def samples(n: int = BATCH * BATCHES + 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 10, generator=generator)
    return list(zip(x, torch.randint(3, (n,), generator=generator), strict=True))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH, **options)


def pinned() -> DataLoader[Any]:
    return loader(pin_memory=True)


class Manual(ByHand, Classifier):
    pass


class WritesIntoItsBatch(Classifier):
    def loss(self, batch: Any) -> Tensor:
        batch[0].mul_(0.5)
        return super().loss(batch)


class KeepsItsBatch(Classifier):
    """And computes with it in the next step, and in the one after that."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if len(batch[0]) > 1:
            self.kept = [*self.kept[-2:], batch]
            for old in self.kept[:-1]:
                loss = loss + 0.1 * super().loss(old)
        return loss


@dataclass
class Pair:
    """Of a type that goes to devices by itself, and looks at the host's values on the way."""

    x: Tensor
    y: Tensor

    def to(self, device: torch.device, **_: Any) -> Pair:
        assert torch.from_numpy(self.x.numpy()).equal(self.x)
        return Pair(self.x.to(device), self.y.to(device))


def pairs() -> DataLoader[Any]:
    collate = torch.utils.data.default_collate
    return loader(collate_fn=lambda rows: {"pair": Pair(*collate(rows)), "all": collate(rows)})


class TakesPairs(Classifier):
    def loss(self, batch: Any) -> Tensor:
        pair = batch["pair"]
        return super().loss((pair.x, pair.y)) + super().loss(batch["all"])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["pair"].x)


class SplitsItself(Classifier):
    def split_batch(self, batch: Any, sizes: Any) -> Any:
        return [[x, y] for x, y in zip(*(t.split(list(sizes)) for t in batch), strict=True)]


class TransfersItself(Classifier):
    """By a constant on the device, which it goes on writing to."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[Any, Tensor] = {}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        assert batch[0].device.type == "cpu"
        scale = self.scales.setdefault(device, torch.ones(10, device=device))
        scale.copy_(torch.full((10,), 0.5))
        return [batch[0].to(device, non_blocking=True) * scale, batch[1].to(device)]


class ChangesWhatHasCome(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * 0.5, y


CASES: dict[str, tuple[type[Classifier], dict[str, Any], dict[str, Any], Callable[[], Any]]] = {
    "step": (Classifier, {}, {}, pinned),
    "pageable": (Classifier, {}, {}, loader),
    "forward": (Classifier, {"mode": "forward"}, {}, pinned),
    "a forward that gets a batch of the host": (
        Classifier,
        {"mode": "forward", "move_batch": False, "output_device": "cpu"},
        {},
        pinned,
    ),
    "manual": (Manual, {}, {}, pinned),
    "accumulating": (Classifier, {}, {"accumulate_grad_batches": 3}, pinned),
    "values on the host": (Classifier, {"output_device": "cpu"}, {}, pinned),
    "in another order": (Classifier, {"split": "cost"}, {}, pinned),
    "written into": (WritesIntoItsBatch, {}, {}, pinned),
    "kept": (KeepsItsBatch, {"mode": "forward"}, {}, pinned),
    "of the user's type": (TakesPairs, {}, {}, pairs),
    "split by the user": (SplitsItself, {}, {}, pinned),
    "transferred by the user": (TransfersItself, {}, {}, pinned),
    "changed after the transfer": (ChangesWhatHasCome, {}, {}, pinned),
    "double precision": (Classifier, {}, {"precision": "64-true"}, pinned),
}
STAY = {"transferred by the user"}


class Costly(Classifier):
    def sample_cost(self, batch: Any) -> list[float]:
        return [1.0 + i % 3 for i in range(len(batch[0]))]


QUICK = {
    ("step", "threads"),
    ("forward", "inorder"),
    ("manual", "inorder"),
    ("transferred by the user", "inorder"),
}


@pytest.mark.parametrize(
    "case, executor",
    [
        pytest.param(case, how, marks=[pytest.mark.slow] * ((case, how) not in QUICK))
        for case in CASES
        for how in ("threads", "inorder")
    ],
)
def test_a_fit_is_that_of_one_device(
    case: str, executor: str, arrived: Counter[torch.device]
) -> None:
    make, options, fit, data = CASES[case]
    make = Costly if options.get("split") == "cost" else make
    expected = run(make, 1, accelerator="cpu", data=data, **fit)
    arrived.clear()
    strategy = {"executor": executor, **options}
    result = run(make, 3, strategy=strategy, data=data, **fit)
    assert_same(result, expected, atol=1e-4)
    assert (arrived.total() == 0) is (case in STAY), arrived


class Trained(Classifier):
    validation_step = None


def fitting() -> Any:
    return trainer(2, max_epochs=1)


@pytest.mark.parametrize("hook", ["transfer_batch_to_device", "on_after_batch_transfer"])
def test_a_data_module_may_transfer_batches_itself(
    hook: str, arrived: Counter[torch.device]
) -> None:
    seen: list[str] = []

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return pinned()

        def move(self, batch: Any, *args: Any) -> Any:
            seen.append(batch[0].device.type)
            return getattr(super(), hook)(batch, *args)

    setattr(Data, hook, Data.move)
    job = fitting()
    job.fit(Trained(), datamodule=Data())
    is_transfer = hook == "transfer_batch_to_device"
    assert set(seen) == ({"cpu"} if is_transfer else {devices_of(1)[0].type})
    assert (arrived.total() == 0) is is_transfer


def test_a_hook_of_the_instance_is_the_users(arrived: Counter[torch.device]) -> None:
    module = Trained()
    own, seen = module.transfer_batch_to_device, []

    def move(batch: Any, *args: Any) -> Any:
        seen.append(batch[0].device.type)
        return own(batch, *args)

    module.transfer_batch_to_device = move
    fitting().fit(module, pinned())
    assert set(seen) == {"cpu"} and not arrived.total()


def test_on_the_cpu_nothing_goes_ahead() -> None:
    cpu = torch.device("cpu")
    engine = StepParallel(nn.Linear(2, 1), [cpu] * 2, output_device=cpu, split=lambda n: (n - 1, 1))
    assert engine.ahead is None
    engine.close()


# --- One batch ahead ----------------------------------------------------------------------------


def on_root(arrived: Counter[torch.device]) -> int:
    """Where a device repeats there is one for all of its replicas."""
    return arrived[devices_of(1)[0]]


class Net(nn.Module):
    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: Any) -> Tensor:
        return self.net(batch["x"]).square().mean()


@contextlib.contextmanager
def engine_on(k: int = 2, module: nn.Module | None = None, **options: Any) -> Iterator[Any]:
    devices = devices_of(k)
    module = (module or Net()).to(devices[0])
    engine = StepParallel(
        module,
        devices,
        output_device=devices[0],
        split=lambda n: (n // k,) * k,
        **{"executor": "inorder", **options},
    )
    try:
        step(engine, batch_of(4))  # the first batch of a kind of step is cut into unequal shards
        yield engine
    finally:
        engine.close()
        for device in devices:
            torch.accelerator.synchronize(device)


def batch_of(n: int = 8, seed: int = 0, width: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, other = torch.randn(n, width, generator=generator), torch.randn(n, generator=generator)
    return {"x": x.pin_memory(), "other": [other.pin_memory()], "name": "batch"}


def step(engine: Any, batch: Any) -> None:
    engine.train("training_step", batch).backward()


def test_batches_that_are_alike_arrive_from_the_third_one_on(arrived: Counter[Any]) -> None:
    with engine_on() as engine:
        counts = []
        for n in (8, 8, 8, 8, 6, 6, 8, 8, 8):
            step(engine, batch_of(n))
            counts.append(on_root(arrived))
        # The batch after the second one of 6 has another size: memory was made for nothing.
        assert counts == [0, 0, 1, 2, 2, 2, 2, 2, 3]


def test_shards_are_those_that_were_sent(arrived: Counter[Any]) -> None:
    seen: list[Any] = []

    class Looks(Net):
        def training_step(self, batch: Any) -> Tensor:
            seen.append(batch)
            return super().training_step(batch)

    with engine_on(module=Looks()) as engine:
        seen.clear()
        for seed in range(5):
            batch = batch_of(seed=seed)
            batch["twice"] = batch["x"]
            step(engine, batch)
            for shard, k in zip(seen, range(2), strict=True):
                here = slice(4 * k, 4 * k + 4)
                assert torch.equal(shard["x"].cpu(), batch["x"][here])
                assert torch.equal(shard["other"][0].cpu(), batch["other"][0][here])
                assert shard["name"] == "batch" and shard["x"].stride() == batch["x"].stride()
                assert shard["twice"] is not shard["x"]
                assert shard["twice"].data_ptr() != shard["x"].data_ptr()
            seen.clear()
    assert on_root(arrived) == 3


def test_shards_that_are_kept_stay_as_they_are(arrived: Counter[Any]) -> None:
    kept: list[Tensor] = []

    class Keeps(Net):
        def training_step(self, batch: Any) -> Tensor:
            kept.append(batch["x"])
            return super().training_step(batch)

    with engine_on(module=Keeps()) as engine:
        kept.clear()
        for seed in range(8):
            step(engine, batch_of(seed=seed))
        for i, shard in enumerate(kept):
            seed, k = divmod(i, 2)
            assert torch.equal(shard.cpu(), batch_of(seed=seed)["x"][4 * k : 4 * k + 4])
    assert len(kept) == 16 and on_root(arrived) == 6


@on_separate
def test_a_device_without_samples_gets_nothing(arrived: Counter[Any]) -> None:
    """Though the module's own split has something for it."""

    class Splits(Net):
        def split_batch(self, batch: Any, sizes: Any) -> Any:
            return [{"x": batch["x"][: max(size, 1)]} for size in sizes]

    with engine_on(3, Splits()) as engine:
        for _ in range(4):
            shards = engine.scatter(batch_of(), plan=Plan((4, 0, 4)))
            assert shards.parts[1] is None
    assert set(+arrived) == {devices_of(3)[0], devices_of(3)[2]}


class Computes(nn.Module):
    """So many operations, which take the same however many samples there are."""

    OPS = 60

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any) -> Tensor:
        first = batch["x"][:1, :1]
        with torch.no_grad():
            for _ in range(self.OPS):
                first + 1
        return (self.weight * 2).sum()


@pytest.fixture
def virtual_time() -> Iterator[None]:
    yield
    torch.sim.set_clock("wall")
    torch.sim.set_links(None)
    for device in range(torch.sim.device_count()):
        torch.sim.set_speed(device)


@sim_only("It computes what a training would take.")
@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_copy_is_hidden_behind_the_step_before(
    k: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer one of the two decides; else it is their sum."""
    width, rows, steps = 256, 16, 10
    copy = rows * width * 4 / 1e9
    for device in range(k):
        torch.sim.set_link("cpu", device, bytes_per_second=1e9)
        torch.sim.set_speed(device, seconds_per_op=copy / share / Computes.OPS)

    def seconds(rows: int) -> float:
        with engine_on(k, Computes()) as engine:
            for i in range(steps + 4):
                if i == 4:
                    torch.sim.set_clock("virtual")
                step(engine, {"x": torch.ones(rows * k, width).pin_memory()})
            for device in range(k):
                torch.sim.synchronize(device)
            return float(torch.sim.elapsed()) / steps

    one_row = seconds(1)  # as good as no copy
    assert seconds(rows) <= max(one_row, copy) * 1.02 + copy / steps  # the first one has to come
    monkeypatch.setattr(ahead, "LEAST_BYTES", 2**62)
    assert seconds(rows) >= one_row + 0.9 * copy


@sim_only("It looks at the timeline.")
@pytest.mark.usefixtures("virtual_time")
def test_a_batch_travels_when_the_one_before_the_latest_is_through() -> None:
    """And no sooner, though the host is far ahead and the copies would take next to no time."""
    rows, width, steps = 8, 256, 6
    torch.sim.set_link("cpu", 0, bytes_per_second=1e12)
    with engine_on(2, Computes()) as engine:
        torch.sim.set_speed(0, seconds_per_op=1e-5)
        ends: list[Any] = []
        for i in range(3 + steps):
            if i == 3:
                torch.sim.set_clock("virtual")
                begin = mark()
            step(engine, {"x": torch.ones(rows * 2, width).pin_memory()})
            ends += [mark()] if i >= 3 else []
        spans = [span for span in torch.sim.timeline().spans if span.row == ("sim:0", "copies in")]
        starts = [s.start / 1e6 for s in spans if s.details["bytes"] == rows * width * 4]
        assert len(starts) == steps
        through = [begin.elapsed_time(end) for end in ends]
        for i in range(2, steps):
            assert through[i - 2] <= starts[i] < through[i - 2] + 1e-3, i


def mark() -> Any:
    event = torch.Event("sim:0", enable_timing=True)
    event.record(torch.sim.current_stream(0))
    return event


@sim_only("Simulated devices count exactly what is in use.")
def test_there_is_memory_for_two_batches_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 8, 4096

    def peak() -> int:
        with engine_on(2, Computes()) as engine:
            for i in range(9):
                if i == 6:
                    torch.sim.reset_peak_memory_stats(1)
                step(engine, {"x": torch.ones(rows * 2, width).pin_memory()})
            return int(torch.sim.max_memory_allocated(1))

    with_it = peak()
    monkeypatch.setattr(ahead, "LEAST_BYTES", 2**62)
    assert with_it - peak() == rows * width * 4


# --- Where memory is short ----------------------------------------------------------------------


@pytest.fixture
def no_peaks() -> None:
    """Those of other tests."""
    gc.collect()
    for device in range(2):
        torch.sim.reset_peak_memory_stats(device)


@sim_only("It limits the memory of a device.")
@pytest.mark.usefixtures("no_peaks")
@pytest.mark.parametrize("is_roomy", [True, False])
def test_memory_is_not_taken_where_it_would_be_short(
    is_roomy: bool, room: Any, arrived: Counter[Any]
) -> None:
    """A tenth of it stays free."""
    size = 4 * 4096 * 4
    with engine_on(2, Big()) as engine:
        run_step(engine)
        peak = torch.sim.max_memory_allocated(1)
        torch.sim.set_memory_limit(1, int((peak + size) / 0.9) + (1 if is_roomy else -10))
        for _ in range(4):
            run_step(engine)
    assert set(+arrived) == set(devices_of(2)[: 1 + is_roomy])


class Big(nn.Module):
    """May take much more memory from some step on."""

    extra = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any) -> Tensor:
        scratch = torch.zeros(Big.extra, dtype=torch.uint8, device=self.weight.device)
        del scratch
        return (batch["x"] * self.weight).mean()


def run_step(engine: Any) -> None:
    batch = {"x": torch.ones(8, 4096).pin_memory()}
    engine.run(TrainingStep(engine, "training_step"), batch).backward()


@sim_only("It limits the memory of a device.")
@pytest.mark.usefixtures("no_peaks")
def test_a_step_without_memory_gets_that_of_the_next_batch(
    room: Any, arrived: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And runs again with the sizes that it had; from then on batches go as they are."""
    shard = 4 * 4096 * 4
    with engine_on(2, Big()) as engine:
        for _ in range(3):
            run_step(engine)
        assert on_root(arrived) == 1
        room(1, 3 * shard)  # and a set more, which is taken already
        monkeypatch.setattr(Big, "extra", int(2.5 * shard))
        run_step(engine)
        assert engine.last_sizes == (4, 4) and engine.ahead is None
        run_step(engine)
    assert on_root(arrived) == 2


# --- What orders the streams --------------------------------------------------------------------


def test_the_callers_stream_may_change_between_steps(arrived: Counter[Any]) -> None:
    """Memory of another stream's order is let go."""
    devices = devices_of(2)
    with engine_on() as engine:
        for _ in range(3):
            step(engine, batch_of())
        before = [torch.accelerator.current_stream(device) for device in devices]
        others = [torch.Stream(device) for device in devices]
        for other, stream in zip(others, before, strict=True):
            other.wait_stream(stream)
        count = on_root(arrived)
        with ahead.on_streams(others):
            step(engine, batch_of())
            assert on_root(arrived) == count
            step(engine, batch_of())
            step(engine, batch_of())
            assert on_root(arrived) == count + 2
        for other, stream in zip(others, before, strict=True):
            stream.wait_stream(other)


def test_memory_of_inference_is_not_for_training(arrived: Counter[Any]) -> None:
    with engine_on() as engine:
        with torch.inference_mode():
            for n in (4, 8, 8, 8):
                engine.evaluate("training_step", batch_of(n))
        assert on_root(arrived) == 1
        step(engine, batch_of())
        assert on_root(arrived) == 1
        step(engine, batch_of())
        assert on_root(arrived) == 2
        with torch.inference_mode():
            engine.evaluate("training_step", batch_of())


def test_after_an_error_batches_go_on_arriving(arrived: Counter[Any]) -> None:
    class Fails(Net):
        fails = False

        def training_step(self, batch: Any) -> Tensor:
            if self.fails:
                raise ArithmeticError("in the middle")
            return super().training_step(batch)

    with engine_on(module=Fails()) as engine:
        for _ in range(3):
            step(engine, batch_of())
        engine.module.fails = True
        with pytest.raises(ArithmeticError):
            step(engine, batch_of())
        engine.module.fails = False
        loss = engine.train("training_step", batch_of(seed=1))
        expected = copy.deepcopy(engine.module).cpu().training_step(batch_of(seed=1))
        torch.testing.assert_close(loss.cpu(), expected)
    assert on_root(arrived) == 3


class Ways:
    """Batches that arrive on two devices, one after another, and are read there."""

    def __init__(self) -> None:
        self.devices = devices_of(2)
        self.ahead = Ahead(self.devices)
        for _ in range(2):
            self.run()

    def run(self) -> list[Tensor]:
        hosts = {d: [torch.full((50,), 3.0 + k).pin_memory()] for k, d in enumerate(self.devices)}
        arrived = self.ahead.bring(hosts)
        sums = []
        for device, own in hosts.items():
            sums += [t.sum() for t in arrived.get(device, [t.to(device) for t in own])]
        return [total.cpu() for total in sums]


@on_separate
def test_an_interrupt_at_any_line_leaves_no_race() -> None:
    """Neither where others get the memory, nor where the next batch does."""
    tracer = Tracer()
    right = tracer.run(Ways().run)
    assert right == [150, 200]
    for line, visits in tracer.visits.items():
        for nth in sorted({1, visits}):
            ways = Ways()
            with contextlib.suppress(KeyboardInterrupt), Surroundings():  # as in every step
                Tracer(line, nth).run(ways.run)
            gc.collect()
            others = [torch.ones(50, device=device) for device in ways.devices]
            assert ways.run() == right, line
            assert all(bool((other == 1).all()) for other in others), line


@on_separate
def test_memory_is_used_again_in_order() -> None:
    """Also by others, when those who made it are gone."""
    for _ in range(3):
        ways = Ways()
        for _ in range(4):
            assert ways.run() == [150, 200]
        del ways
        for device in devices_of(2):
            for n in (1, 50, 10_000):
                torch.ones(n, device=device)


def test_what_arrives_waits_for_those_who_had_the_memory_before() -> None:
    """The host waits for nothing; each batch's memory was that of one before."""
    devices = devices_of(2)
    ways = Ahead(devices)
    totals = []
    for i in range(8):
        hosts = {device: [torch.full((4096,), float(i)).pin_memory()] for device in devices}
        arrived = ways.bring(hosts)
        shards = [arrived.get(d, [host.to(d, non_blocking=True)])[0] for d, [host] in hosts.items()]
        for shard in shards:
            shard.add_(1)
        totals.append([shard.sum() for shard in shards])
        del arrived, shards
    assert [[t.item() / 4096 for t in row] for row in totals] == [
        [i + 1.0] * len(hosts) for i in range(8)
    ]


# --- The drop-in --------------------------------------------------------------------------------


def test_the_drop_in(arrived: Counter[Any]) -> None:
    torch.manual_seed(0)
    one = nn.Linear(10, 3)
    net = DataParallel(nn.Linear(10, 3).to(devices_of(1)[0]), devices_of(3))
    net.load_state_dict(one.state_dict())
    for seed in range(5):
        x = torch.randn(7, 10, generator=torch.Generator().manual_seed(seed)).pin_memory()
        torch.testing.assert_close(net(x).cpu(), one(x))
    net.close()
    assert on_root(arrived) == 3
