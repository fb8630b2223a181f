"""Contexts: every error leaves them as it is, and none of them outlasts an interrupt."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_cases import IN_MODES, INSIDE, FaultCase, Setting, run_fault
from hostile_errors import HOSTILE, groups
from interrupts import Tracer
from lightning.pytorch import LightningModule
from program_runs import ROOT
from torch import Tensor, nn
from torch._dynamo import config
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torchmetrics import MeanMetric

from lightning_dp.metrics import Journals, OwnRows
from lightning_dp.metrics.arguments import MetricCall
from lightning_dp.metrics.one_call import CalledModule, StepAttributes
from lightning_dp.metrics.recorders import ReplicaMetrics
from lightning_dp.modes.schedules import Schedules
from lightning_dp.modes.step_mode import _around_step
from lightning_dp.parallel.additive import Traces
from lightning_dp.parallel.batch import Shards
from lightning_dp.parallel.contexts import (
    Contexts,
    Lasting,
    Paired,
    Surroundings,
    replaced,
    standing_in,
)
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.generated import context
from lightning_dp.parallel.ranges import Ranges
from lightning_dp.parallel.replicas import Replicas
from lightning_dp.parallel.torch_private import (
    Modes,
    backwards_go_to,
    current_modes,
    entries_of,
    more_recompilations,
)
from lightning_dp.parallel.workers.thread_state import ThreadState
from lightning_dp.state import SharedMethods, shared_optimizers

CPU = torch.device("cpu")
ERRORS: dict[str, Callable[[], BaseException]] = {
    **{name: partial(kind, "text") for name, kind in HOSTILE.items()},
    **{name: partial(lambda name: groups()[name], name) for name in groups()},
    "RuntimeError of a StopIteration": lambda: _caused_by_stop(),
}


def _caused_by_stop() -> BaseException:
    error = RuntimeError("a text")
    error.__cause__ = StopIteration()
    return error


@context
def generated() -> Iterator[None]:
    try:
        yield
    finally:
        gc.get_count()


@context
def one_in_another() -> Iterator[None]:
    with generated(), generated():
        yield


class Idle(Lasting):
    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


class Measured(LightningModule):
    """A module with a metric and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.metric = nn.Linear(3, 1), MeanMetric()
        self.seen: list[int] = []


class Fixture:
    """Something of everything that contexts of ours act on, and how it looks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.engine = ForwardParallel(
            self.net, [CPU, CPU], output_device=CPU, split=lambda n: (n - 1, 1)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
        self.shared = SharedMethods()
        self.metric, self.twin = Scaled(), Scaled()
        self.attributes = {id(self.metric): StepAttributes(self.metric)}
        self.called: list[MetricCall] = []
        submodules = list(self.metric.modules()), list(self.twin.modules())
        self.metrics = ReplicaMetrics(submodules, self.called.append, CPU, self.attributes)
        self.ranges = Ranges()
        self.ranges.profile = lambda name: nullcontext()
        self.state = ThreadState.capture([CPU])
        self.measured = Measured()
        self.journals = Journals(self.measured, [CPU, CPU], CPU)
        self.replicas = Replicas(self.measured, [CPU, CPU], self.journals)
        self.shards = Shards((1, 1), [torch.ones(1, 3)] * 2)
        strategy = SimpleNamespace(optimizers=[self.optimizer, self.other])
        self.trainer = SimpleNamespace(strategy=strategy, loggers=[Idle()])

    def look(self) -> dict[str, Any]:
        """What would be different if a context had not ended."""
        tools = [self.optimizer, self.other]
        return {
            "forwards": [vars(m).get("forward") for m in self.net.modules()],
            "spreads": self.engine.is_spreading,
            "is rerun": self.engine.is_rerun,
            "attributes": [sorted(vars(m)) for m in (self.net, self.metric, self.twin)],
            "logs": [vars(m).get("log") for m in (*self.replicas.modules, self.measured.metric)],
            "methods": [sorted(vars(m.metric)) for m in self.replicas.modules],
            "classes": list(map(type, tools)),
            "shared": dict(self.shared._shared),
            "groups": [list(map(id, tool.param_groups)) for tool in tools],
            "kinds of groups": [list(map(type, tool.param_groups)) for tool in tools],
            "values": [_values(m) for m in (self.metric, self.twin)],
            "is calling": self.metrics.is_calling,
            "loggers": list(map(type, self.trainer.loggers)),
            "ranges": set(self.ranges._open),
            "modes": current_modes(),
            "backward": torch.autograd._engine_run_backward,
            "limit": config.recompile_limit,
            "hooks": len(_global_optimizer_pre_hooks),
            "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        }


class Scaled(MeanMetric):
    """With what a call may write to, and what a step may bind."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.seen: list[int] = []
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("last", torch.zeros(()))

    def update(self, value: Tensor) -> None:
        self.seen.append(len(value))
        self.last = value.mean().detach()
        super().update(self.factor * self.gain.detach() * value)


def _values(metric: Scaled) -> list[Any]:
    kept = {name: id(value) for name, value in vars(metric).items() if name[0] != "_"}
    state = [id(metric.gain), float(metric.last), list(metric.seen), metric.factor]
    return [kept, *state, metric.gain.requires_grad]


def _bind(fixture: Fixture) -> AbstractContextManager[Any]:
    """A replay, after a step that has bound an attribute before its call."""
    attributes = fixture.attributes[id(fixture.metric)]
    attributes.begin_step()
    return attributes.as_at({"factor": 2.0, "last": torch.ones(())}, CPU)


def _call(fixture: Fixture) -> AbstractContextManager[Any]:
    return _Recorded(fixture)


class _Recorded(AbstractContextManager[None]):
    """A step that calls a metric, whose value is wanted."""

    def __init__(self, fixture: Fixture) -> None:
        self._twin, self._recording = fixture.twin, fixture.metrics.recording()

    def __enter__(self) -> None:
        self._recording.__enter__()
        self._twin(torch.arange(3.0))

    def __exit__(self, *error: Any) -> bool | None:
        return self._recording.__exit__(*error)


def _in_modes(fixture: Fixture) -> AbstractContextManager[Any]:
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    return Contexts(entries_of(Modes(torch.device("meta"), (Mode(),), ())))


def _with_step(fixture: Fixture) -> AbstractContextManager[Any]:
    return fixture.shared.standing_in(fixture.optimizer, {"step": len}, 0)


def _rows(fixture: Fixture) -> OwnRows:
    module: Any = SimpleNamespace(trainer=fixture.trainer)
    return OwnRows(module)


def _step_of_all(fixture: Fixture) -> AbstractContextManager[Any]:
    """What surrounds a training step of the Trainer."""
    module: Any = SimpleNamespace(trainer=fixture.trainer)
    manual: Any = SimpleNamespace(step=None)
    schedules = Schedules(module, is_sum=False)
    schedules.optimizers = fixture.trainer.strategy.optimizers
    schedules.found = [ConstantLR(own) for own in schedules.optimizers]
    step = fixture.replicas, "training_step", fixture.shards, False
    return _around_step(fixture.journals, _rows(fixture), manual, schedules, module, *step)


def _looked_at(fixture: Fixture) -> AbstractContextManager[Any]:
    """What replicas say in a step that is traced."""
    fixture.shards.traces[:] = [Traces(fixture.replicas.modules)]
    return fixture.journals.around(fixture.replicas, fixture.shards, False, "training_step")


CONTEXTS: dict[str, Callable[[Fixture], AbstractContextManager[Any]]] = {
    "nothing": lambda f: nullcontext(),
    "a generator": lambda f: generated(),
    "one in another": lambda f: one_in_another(),
    "lasting": lambda f: Idle(),
    "several": lambda f: Contexts([generated(), Idle(), Contexts([generated()])]),
    "replaced": lambda f: replaced(f.net, forward=len, extra=1),
    "a method": lambda f: standing_in(f.net, "forward", len),
    "spreading": lambda f: f.engine.spreading(),
    "a turn": lambda f: f.engine.turn(),
    "rerunning": lambda f: f.engine.rerunning(),
    "recompilations": lambda f: more_recompilations(3),
    "backwards": lambda f: backwards_go_to(len),
    "a range": lambda f: f.ranges.of("step"),
    "a moved thread": lambda f: f.state.moved_to(CPU),
    "modes": _in_modes,
    "a shared method": _with_step,
    "shared options": lambda f: shared_optimizers([f.optimizer, f.other], f.engine.replicas, 0),
    "recording": lambda f: f.metrics.recording(),
    "a metric's call": _call,
    "a metric as it was": _bind,
    "what replicas say": lambda f: f.journals.around(f.replicas, f.shards),
    "what is looked at": _looked_at,
    "what a logger notes": lambda f: _rows(f).around("training_step", 2),
    "a step of all": _step_of_all,
}


@pytest.fixture
def fixture() -> Iterator[Fixture]:
    fixture = Fixture()
    yield fixture
    fixture.engine.close()


def leaving(make: Callable[[], AbstractContextManager[Any]], error: BaseException) -> Any:
    """What comes out of a context that an error leaves, and its frames: nobody asks it."""
    try:
        with make():
            raise error
    except BaseException as arrived:
        frames = traceback.extract_tb(sys.exc_info()[2])
        return arrived, [(frame.name, frame.lineno) for frame in frames]


@pytest.mark.parametrize("name", CONTEXTS)
def test_every_error_leaves_every_context_as_it_is(name: str, fixture: Fixture) -> None:
    make = partial(CONTEXTS[name], fixture)
    for kind, error_of in ERRORS.items():
        before, error = fixture.look(), error_of()
        arrived, frames = leaving(make, error)
        assert arrived is error, (kind, type(arrived))
        assert frames == leaving(nullcontext, error_of())[1], kind  # and none of ours
        assert fixture.look() == before, kind


@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_a_thread_state_lets_every_error_pass(executor: str) -> None:
    for kind, error_of in ERRORS.items():
        error = error_of()

        def fail(error: BaseException) -> None:
            raise error

        state = ThreadState.capture([CPU])
        arrived, _ = leaving(lambda: Paired(partial(state.call, CPU, fail, error), len), error)  # noqa: B023  # called now
        assert arrived is error, kind


@pytest.mark.parametrize("stage", [s for s in IN_MODES["drop-in"] if s in INSIDE])
@pytest.mark.parametrize("executor", ["threads", "inorder"])
def test_every_stage_lets_errors_pass_that_take_no_attributes(stage: str, executor: str) -> None:
    for error in ("bad setattr", "bad getattribute", "StopIteration"):
        case = FaultCase(Setting("drop-in", executor), stage, error)
        assert not (left := run_fault(case)), (str(case), left)


def lasts(fixture: Fixture, make: Callable[[Fixture], AbstractContextManager[Any]]) -> None:
    with Surroundings(), make(fixture):
        pass


LONG = ("what replicas say", "what is looked at", "a step of all")
"""Of hundreds of lines, each of which is interrupted."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CONTEXTS]
)
def test_an_interrupt_at_any_line_of_a_context_leaves_nothing_open(
    name: str, fixture: Fixture
) -> None:
    before = fixture.look()
    tracer = Tracer()
    tracer.run(partial(lasts, fixture, CONTEXTS[name]))
    assert fixture.look() == before
    for line, visits in tracer.visits.items():
        for nth in range(1, visits + 1):
            try:
                Tracer(line, nth).run(partial(lasts, fixture, CONTEXTS[name]))
            except KeyboardInterrupt as interrupt:  # which holds the frames: nothing is collected
                assert fixture.look() == before, (line, nth)
                interrupt.__traceback__ = None


class Payload(Idle):
    """Something that contexts hold."""


@context
def holding(payload: Payload) -> Iterator[None]:
    try:
        yield
    finally:
        payload.end()


HOLDING: dict[str, Callable[[Payload], AbstractContextManager[Any]]] = {
    "lasting": lambda payload: payload,
    "a generator": holding,
    "several": lambda payload: Contexts([holding(payload), Paired(payload.begin, payload.end)]),
    "replaced": lambda payload: replaced(payload, end=len, begin=len),
}


def _interrupted(name: str, tracer: Tracer) -> weakref.ref[Payload]:
    """A payload whose context was interrupted, outside of surroundings."""
    payload = Payload()

    def last() -> None:
        with HOLDING[name](payload):
            pass

    with pytest.raises(KeyboardInterrupt):
        tracer.run(last)
    return weakref.ref(payload)


@pytest.mark.parametrize("name", HOLDING)
def test_an_interrupt_where_nobody_looks_keeps_nothing_alive(name: str) -> None:
    def last() -> None:
        with HOLDING[name](Payload()):
            pass

    tracer = Tracer()
    tracer.run(last)
    assert len(tracer.visits) > 3
    for line, visits in tracer.visits.items():
        for nth in range(1, visits + 1):
            payload = _interrupted(name, Tracer(line, nth))
            gc.collect()
            assert payload() is None, (line, nth)


def test_a_generator_may_swallow_an_error_and_raise_others() -> None:
    @context
    def swallowing() -> Iterator[int]:
        try:
            yield 7
        except ValueError:
            return
        except KeyError as error:
            raise TypeError("another") from error
        except StopIteration:
            raise StopIteration("another") from None

    with swallowing() as value:
        assert value == 7
        raise ValueError
    with pytest.raises(TypeError, match="another") as caught, swallowing():
        raise KeyError
    assert type(caught.value.__context__) is KeyError
    with pytest.raises(StopIteration, match="another"), swallowing():
        raise StopIteration("first")


def test_a_generator_that_fails_to_begin_raises_its_error() -> None:
    error = StopIteration("at its beginning")

    @context
    def failing() -> Iterator[None]:
        if error is not None:
            raise error
        yield

    with pytest.raises(StopIteration) as caught, failing():
        pass
    assert caught.value is error


def test_a_generator_that_yields_twice_is_a_mistake() -> None:
    @context
    def twice() -> Iterator[None]:
        yield
        yield

    with pytest.raises(RuntimeError, match="yield once"), twice():
        pass


def test_several_contexts_end_in_turn_and_with_the_latest_error() -> None:
    told: list[str] = []

    class Told(AbstractContextManager[None]):
        def __init__(self, name: str, error: BaseException | None = None) -> None:
            self.name, self.error = name, error

        def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
            told.append(f"{self.name}: {error!r}")
            if self.error is not None:
                raise self.error

    several = Contexts([Told("first"), Told("second", KeyError()), Told("third")])
    with pytest.raises(KeyError) as caught, several:
        raise ValueError
    assert told == ["third: ValueError()", "second: ValueError()", "first: KeyError()"]
    assert type(caught.value.__context__) is ValueError

    def parts() -> Iterator[Told]:
        yield Told("begun")
        raise TypeError

    told.clear()
    with pytest.raises(TypeError), Contexts(parts()):
        pass
    assert told == ["begun: TypeError()"]


def test_an_interrupted_end_of_a_call_can_be_told_again(fixture: Fixture) -> None:
    """Line by line, as it is told once more by whoever puts things back."""

    def step() -> None:
        called.begin_step()
        called.begin_call()
        fixture.twin.update(torch.arange(3.0))
        fixture.twin.seen, fixture.twin.new = [1], 2  # as its own code would
        called.end_call()
        called.end_step()

    called = CalledModule(fixture.metric, fixture.twin, CPU)
    before, tracer = fixture.look(), Tracer()
    tracer.run(step)
    assert fixture.look() == before
    ends = {CalledModule.end_call, CalledModule.end_step, CalledModule._leave}
    lines = {line for end in ends for line in _lines_of(end)}
    assert len(lines & tracer.visits.keys()) > 15
    for line in lines & tracer.visits.keys():
        for nth in range(1, tracer.visits[line] + 1):
            with pytest.raises(KeyboardInterrupt):
                Tracer(line, nth).run(step)
            called.end_call()
            called.end_step()
            assert fixture.look() == before, (line, nth)


def _lines_of(function: Callable[..., Any]) -> list[tuple[str, int]]:
    lines, first = inspect.getsourcelines(function)
    file = inspect.getsourcefile(function) or ""
    return [(file, first + i) for i in range(len(lines))]


def test_generators_of_contextlib_are_not_used() -> None:
    """They write to the errors that leave them, and an interrupt can keep them open.

    Programs end then, and simulated devices are for tests.
    """
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted(Path(ROOT / "lightning_dp").rglob("*.py"))
        if not {"app", "doctor", "sim"} & set(file.parts)
        for node in ast.walk(ast.parse(file.read_text()))
        if _names(node) & {"contextmanager", "ExitStack", "closing", "redirect_stdout"}
    ]
    assert not found, "Expected lightning_dp.parallel.contexts to be used instead."


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "contextlib":
        return {alias.name for alias in node.names}
    is_member = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return {node.attr} if is_member and node.value.id == "contextlib" else set()
