"""A small training that fails, or is interrupted, in a place that one may choose; and what is left.

The oracle is one device: the same error ends the same training there, and the next training of the
same module, undisturbed, must give what it gives there.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any
from unittest import mock

import sim_devices
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_dp import DataParallel, DataParallelStrategy
from lightning_dp.parallel.apply import collectives, current_participant
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.reduce import Reducer
from lightning_dp.parallel.replicate import Replicas
from support import oracle
from support.oracle import loader

K = 3
BATCH = 12  # 4 samples each
SAMPLES = 2 * BATCH

MODES = ("step", "forward", "drop-in")
EXECUTORS = ("threads", "inorder")

IN_REPLICAS = ("step", "network", "log", "metric", "collective", "evaluation", "backward hook")
ON_SHARDS = ("transfer hook", "after transfer")
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_end",
)
ELSEWHERE = ("loss", "metric of all", "reduce", "optimizer step", "zero_grad")
INSIDE: dict[str, tuple[type, str]] = {
    "plan": (Engine, "plan"),
    "scatter": (Engine, "scatter"),
    "replicate": (Replicas, "refresh"),
    "apply": (Engine, "apply"),
    "gather": (Engine, "gather"),
    "before backward": (Reducer, "before_backward"),
    "after backward": (Reducer, "after_backward"),
}
"""Stages of the engine itself: what fails there is put in front of, or behind, its own work."""

IN_MODES: dict[str, tuple[str, ...]] = {
    "step": (*IN_REPLICAS, *ON_SHARDS, *HOOKS, *ELSEWHERE, *INSIDE),
    "forward": (
        *("network", "backward hook", "evaluation", "collective"),
        *ON_SHARDS,
        *HOOKS,
        *("reduce", "optimizer step", "zero_grad"),
        *(stage for stage in INSIDE if "backward" not in stage),
    ),
    "drop-in": (
        *("network", "backward hook", "collective", "reduce", "optimizer step", "zero_grad"),
        *(stage for stage in INSIDE if "backward" not in stage),
    ),
}

ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": partial(ValueError, "a value"),
    "RuntimeError": partial(RuntimeError, "a text"),
    "KeyError": partial(KeyError, "a key"),
    "AttributeError": partial(AttributeError, "an attribute"),
    "MemoryError": MemoryError,
    "out of memory": partial(torch.OutOfMemoryError, "a device's memory"),
    "RecursionError": partial(RecursionError, "too deep"),
    "TimeoutError": partial(asyncio.TimeoutError),
    "KeyboardInterrupt": KeyboardInterrupt,
}


class FaultyError(RuntimeError):
    """With arguments of its own, which cannot be made from a message alone."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code}")
        self.where = where


ERRORS["own arguments"] = partial(FaultyError, 7, where="here")


@dataclass
class Fault:
    """An error that is raised once the training comes to a stage of the second batch.

    In replicas, by the one that has a certain sample.
    """

    stage: str = "none"
    error: BaseException | None = None
    row: float = 0.0
    batch: int = 0

    def at(self, stage: str, x: Tensor | None = None) -> None:
        """Raises it, if this is the stage, the batch and the sample."""
        if self.error is None or stage != self.stage:
            return
        if bool((x[:, 0] == self.row).any()) if x is not None else self.batch == 1:
            raise self.error

    def __deepcopy__(self, memo: dict[int, Any]) -> Fault:
        return self


class Sour(Metric):
    """Counts samples; may fail while it does."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.fault.at("metric of all", x)
        self.count += len(x)

    def compute(self) -> Tensor:
        return self.count


class Outputs(dict[str, Any]):
    """What a step returns, which may fail when somebody looks for the loss."""

    fault: Fault

    def get(self, key: str, default: Any = None) -> Any:
        if key == "loss":
            self.fault.at("loss")
        return super().get(key, default)

    def items(self) -> Any:
        self.fault.at("loss")
        return super().items()

    def __contains__(self, key: object) -> bool:
        self.fault.at("loss")
        return super().__contains__(key)


class Descent(torch.optim.SGD):
    """May fail in the middle of a step."""

    fault: Fault

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.fault.at("optimizer step")
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.fault.at("zero_grad")


class Victim(LightningModule):
    """A training with most of what there is: metrics, logs, buffers, hooks, an evaluation."""

    def __init__(self, mode: str, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.mode = mode
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(()))
        self.sour = Sour(fault)
        self.losses: list[int] = []
        # Gradients of parameters are complete when they are reduced.
        self.net[2].bias.register_hook(partial(_at_reduce, fault))

    def forward(self, x: Tensor) -> Tensor:
        if self.fault.stage == "collective":
            collectives.barrier("before")
        self.fault.at("network", x)
        self.fault.at("collective", x)
        if self.fault.stage == "collective":
            collectives.barrier("after")
        z = self.net(x)
        if z.requires_grad:
            fault = self.fault  # a graph that reaches what holds it is never freed
            z.register_hook(lambda gradient: fault.at("backward hook", x))
        return z

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fault.at("step", batch[0])
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        self.fault.at("log", batch[0])
        self.fault.at("metric", batch[0])
        self.sour.update(batch[0])
        if self.fault.stage != "loss":
            return loss
        outputs = Outputs(loss=loss)
        outputs.fault = self.fault
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fault.at("evaluation", batch[0])
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.fault.at("transfer hook", batch[0])
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.fault.at("after transfer", batch[0])
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fault.batch = batch_idx
        self.fault.at("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.fault.at("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.fault.at("on_before_backward")

    def on_after_backward(self) -> None:
        self.fault.at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fault.at("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fault.at("on_train_batch_end")

    def on_validation_end(self) -> None:
        self.fault.at("on_validation_end")

    def configure_optimizers(self) -> Any:
        return descent(self)


def _at_reduce(fault: Fault, gradient: Tensor) -> Tensor:
    fault.at("reduce")
    return 0.5 * gradient  # without the hook, numbers differ


def descent(module: Victim) -> Descent:
    optimizer = Descent(module.parameters(), 0.1, momentum=0.9)
    optimizer.fault = module.fault
    return optimizer


# Training


@dataclass(frozen=True)
class Setting:
    """How a training runs."""

    mode: str
    executor: str = "inorder"
    on: str = "cpu"  # or "sim"
    devices: int = K

    @property
    def alone(self) -> Setting:
        """The same on one device."""
        return Setting(self.mode, devices=1)


def train(module: Victim, setting: Setting) -> None:
    """Two batches, and an evaluation."""
    oracle.ON = setting.on
    if setting.on == "sim":
        sim_devices.enable(8)
    if setting.mode == "drop-in":
        return train_plainly(module, setting)
    strategy: Any = "auto"
    if setting.devices > 1:
        mode: Any = "forward" if setting.mode == "forward" else "step"
        # Faults are counted in calls; the check makes some of its own.
        options: dict[str, Any] = {"mode": mode, "executor": setting.executor}
        strategy = DataParallelStrategy(**options, check_first_step=False)
    loops = {"max_epochs": 1, "num_sanity_val_steps": 0, "precision": "64-true"}
    job = oracle.trainer(setting.devices, strategy, **loops)
    job.fit(module, loader(SAMPLES, BATCH), loader(BATCH, BATCH))


def train_plainly(module: Victim, setting: Setting) -> None:
    """With plain PyTorch."""
    devices = oracle.devices_of(setting.devices) if setting.devices > 1 else []
    net: Any = module
    if devices:
        module.to(devices[0])
        net = DataParallel(module, devices, executor=setting.executor, check_first_call=False)
    optimizer = descent(module)
    try:
        for module.fault.batch, (x, y) in enumerate(loader(SAMPLES, BATCH)):
            optimizer.zero_grad()
            z = net(x.double())
            F.cross_entropy(z, y.to(z.device)).backward()
            optimizer.step()
    finally:
        if devices:
            net.close()
            module.to("cpu")


def victim(mode: str, fault: Fault) -> Victim:
    """Always the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Victim(mode, fault).double()


# What is left

_told: set[threading.Thread] = set()


def caught(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises, without its frames: `pytest.raises` would look at it."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        call()
    except BaseException as error:
        for each in _with_contexts(error):
            BaseException.__setattr__(each, "__traceback__", None)
        return error
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it while it ends a run
        gc.collect()  # generators that an interrupt has kept from their ends come to them now
    return None


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = BaseException.__getattribute__(error, "__context__")


def threads_left(seconds: float = 2) -> list[str]:
    """Names of the engine's threads that do not end within a while; of each it tells once."""
    end = time.monotonic() + seconds
    while True:
        left = [t for t in threading.enumerate() if t.name.startswith("dp-") and t not in _told]
        if not left or time.monotonic() > end:
            _told.update(left)
            return [t.name for t in left]
        gc.collect()
        time.sleep(0.01)


@cache
def undisturbed(mode: str) -> dict[str, Tensor]:
    """What a training leaves on one device."""
    module = victim(mode, Fault())
    train(module, Setting(mode, devices=1))
    return copy.deepcopy(module.state_dict())


@cache
def _attributes(mode: str) -> dict[str, set[str]]:
    module = victim(mode, Fault())
    train(module, Setting(mode, devices=1))
    return {name: set(vars(each)) for name, each in module.named_modules()}


def thread_state(setting: Setting) -> dict[str, Any]:
    """What PyTorch keeps for the calling thread, and for threads to come."""
    state = {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "intra-op threads": torch.get_num_threads(),
        "intra-op threads of new threads": _in_new_thread(torch.get_num_threads),
        "replica": current_participant(),
    }
    if setting.on == "sim":
        sim_devices.enable(8)
        accelerator = torch.accelerator
        state["device"] = accelerator.current_device_index()
        state["streams"] = list(map(accelerator.current_stream, range(accelerator.device_count())))
    return state


def _in_new_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def _put_back(state: dict[str, Any]) -> None:
    """Of a case that leaves a mess, the next one shall not be accused."""
    torch.set_num_threads(state["intra-op threads"])
    torch.set_grad_enabled(state["gradients"])
    for stream in state.get("streams", ()):
        torch.accelerator.set_stream(stream)
    if "device" in state:
        torch.accelerator.set_device_index(state["device"])


def what_is_broken(module: Victim, setting: Setting, before: dict[str, Any]) -> str:
    """What is wrong with a module whose training has ended early; "" if nothing is.

    And with the thread, whose state was something `before`.
    """
    module.fault.error = None
    for what, now in thread_state(setting).items():
        if now != before[what]:
            _put_back(before)
            return f"{what}: expected {before[what]}, got {now}"
    known = _attributes(setting.mode)
    for name, each in module.named_modules():
        extra = {key for key in set(vars(each)) - known[name] if key != "_forward_hooks"}
        if extra & {"forward", "log", "update", "compute", "reset", "manual_backward"}:
            return f"attributes are left on {name or 'the module'}: {sorted(extra)}"
    with contextlib.suppress(AttributeError):  # it never came so far
        module.trainer = None
    module.load_state_dict(victim(setting.mode, module.fault).state_dict())
    module.sour.reset()
    error = caught(partial(train, module, setting))
    if error is not None:
        return f"the next training ends with {type(error).__name__}: {error}"
    for key, value in undisturbed(setting.mode).items():
        if not torch.allclose(module.state_dict()[key].cpu(), value, rtol=1e-9, atol=1e-11):
            return f"the next training has another {key}"
    return ""


@dataclass
class Left:
    """What a case has left behind: nothing of it, if all is well."""

    wrong_error: str = ""
    threads: str = ""
    broken: str = ""

    def __bool__(self) -> bool:
        return bool(self.wrong_error or self.threads or self.broken)


# Faults


@dataclass(frozen=True)
class FaultCase:
    """An error, where it is raised, and how the training runs."""

    setting: Setting
    stage: str
    error: str
    replica: int = 0
    behind: bool = False  # of a stage inside the engine: after its own work

    def __str__(self) -> str:
        s = self.setting
        return (
            f"{self.error} in {self.stage}, replica {self.replica}, {s.mode}, {s.executor}, {s.on}"
        )


def fault_cases(count: int, seed: int, on: tuple[str, ...] = ("cpu", "sim")) -> list[FaultCase]:
    """So many, of all kinds: errors, stages, replicas, modes, executors and devices."""
    draw = random.Random(seed)
    cases: dict[FaultCase, None] = {}
    stages = [(mode, stage) for mode in MODES for stage in IN_MODES[mode]]
    places = [(*place, executor, kind) for place in stages for executor in EXECUTORS for kind in on]
    decks: dict[str, list[Any]] = {"places": [], "errors": []}

    def dealt(name: str, all_of: list[Any]) -> Any:
        if not decks[name]:
            decks[name] = draw.sample(all_of, len(all_of))
        return decks[name].pop()

    while len(cases) < count:
        mode, stage, executor, kind = dealt("places", places)
        error = dealt("errors", list(ERRORS))
        setting = Setting(mode, executor, kind)
        cases[FaultCase(setting, stage, error, draw.randrange(K), draw.random() < 0.5)] = None
    return list(cases)


def run_fault(case: FaultCase) -> Left:
    """Raises the error, and looks at what is left."""
    _expected(case)  # a training of its own, which is remembered
    before = thread_state(case.setting)
    module, error, how = _ended(case, case.setting)
    left = Left(threads=", ".join(threads_left()))
    if how != (expected := _expected(case)):
        left.wrong_error = f"expected {expected}, got {how}"
    elif not _is_named(case, error):
        left.wrong_error = "the error does not name the replica"
    left.broken = what_is_broken(module, case.setting, before)
    left.threads = left.threads or ", ".join(threads_left())
    return left


def _ended(case: FaultCase, setting: Setting) -> tuple[Victim, BaseException, str]:
    """How a training ends: what arrives, and whether it is the error itself."""
    error = ERRORS[case.error]()
    stage = case.stage
    if case.stage in INSIDE and setting.devices == 1:
        stage = "zero_grad"  # as good as any other on the main thread
    of_batch = 0 if case.stage == "evaluation" else 1
    row = BATCH * of_batch + case.replica * BATCH // K + 1
    samples = loader(BATCH if case.stage == "evaluation" else SAMPLES).dataset.tensors[0]
    fault = Fault(stage, error, float(samples[row, 0]))
    module = victim(setting.mode, fault)
    with _inside(case, fault):
        arrived = caught(partial(train, module, setting))
    BaseException.__setattr__(error, "__traceback__", None)  # it may have been swallowed
    how = "no error" if arrived is None else type(arrived).__name__
    return module, error, f"{how}{' itself' if arrived is error else ''}"


@cache
def _outcome_alone(mode: str, stage: str, error: str) -> str:
    case = FaultCase(Setting(mode, devices=1), stage, error)
    return _ended(case, case.setting)[2]


def _expected(case: FaultCase) -> str:
    return _outcome_alone(case.setting.mode, case.stage, case.error)


def _is_named(case: FaultCase, error: BaseException) -> bool:
    """Whether an error of a replica says which one; not all of them can."""
    of_replica = case.stage in ("step", "network", "log", "metric", "collective", "evaluation")
    if not of_replica or case.error == "KeyboardInterrupt":
        return True
    if case.setting.mode == "forward" and case.stage == "evaluation":
        return True  # the step runs on the main thread
    said = "".join([str(error), *getattr(error, "__notes__", ())])
    return f"in replica {case.replica} on" in said


@contextlib.contextmanager
def _inside(case: FaultCase, fault: Fault) -> Iterator[None]:
    if case.stage not in INSIDE or case.setting.devices == 1:
        yield
        return
    owner, name = INSIDE[case.stage]
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not case.behind:
            fault.at(case.stage)
        result = original(*args, **kwargs)
        fault.at(case.stage)
        return result

    with mock.patch.object(owner, name, failing):
        yield


def all_settings(on: tuple[str, ...] = ("cpu", "sim")) -> list[Setting]:
    """Every mode, on every kind of devices, by every executor."""
    ways = [[Setting(m, e, kind) for m in MODES for e in EXECUTORS] for kind in on]
    return list(chain.from_iterable(ways))
