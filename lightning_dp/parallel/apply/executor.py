"""Executor: makes one call per replica, in worker threads or one after another.

[Note: the main thread acts once while all replicas stand still]
"Main thread" means the one that runs an apply. It waits until every replica has ended its call or
waits in a rendezvous. If all of them wait in the same one, it calls the rendezvous's `act` once,
with the values of all replicas, and hands each replica its result. If some have ended or wait
elsewhere, all get an error: so no replica waits for one that never comes.

In threads every replica has a worker. In order the main thread makes the calls itself, one after
another; if one of them comes to a rendezvous, those behind it begin in their workers, and the
replicas take turns from one rendezvous to the next, never two at a time.

A KeyboardInterrupt may come at any line of the main thread. So the state of a task, which has one
writer at a time, is the only record of what has happened; `_events` only wakes the main thread.
"""

from __future__ import annotations

import contextvars
import gc
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_dp.parallel.apply import worker
from lightning_dp.parallel.apply.worker import ThreadState, Worker, have_ended, start_workers
from lightning_dp.parallel.checks import check_choice
from lightning_dp.parallel.comm import DeviceTimer, current_stream, on_streams
from lightning_dp.parallel.devices import CPU, replica_names, replica_text, seed_apart
from lightning_dp.parallel.errors import add_note
from lightning_dp.parallel.torch_private import (
    MODE_COUNTS,
    backward_id,
    has_own_modes,
)

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

ExecutorName: TypeAlias = Literal["auto", "threads", "inorder"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "threads", "inorder")

# [Note: no garbage collection while replicas run in threads]
# Before Python 3.12 creating an object may start a collection, also inside torch while it holds a
# generator's mutex. If that frees a tensor, torch releases the GIL; a thread that takes it and
# waits for the mutex (`get_rng_state`, in activation checkpoints) keeps the GIL: a deadlock.
COLLECTS_ANYWHERE = sys.version_info < (3, 12)


class Executor:
    """Makes the calls of all replicas, and returns their results in order.

    In `"threads"`, where replica k always runs in worker k; `"inorder"`, one after another on the
    calling thread, for a debugger or to repeat a run bit by bit; or `"auto"`, which measures both
    for each kind of call and keeps the faster: threads win where the devices compute, in order
    wins where Python is the bottleneck.

    Args:
        devices: the replicas' devices, the root device first.
        how: "threads", "inorder" or "auto".
        on_left_behind: called when a replica did not end: its thread may still use the module.
        names: the replicas' names, for errors.
        timeout: seconds that replicas wait in a rendezvous for one that does not come.

    Attributes:
        is_terminated: whether the process has received SIGTERM: then they wait no longer.
    """

    is_terminated: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        devices: Sequence[torch.device],
        how: ExecutorName = "auto",
        on_left_behind: Callable[[], None] = lambda: None,
        names: Sequence[str] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        check_choice("executor", how, EXECUTORS)
        self._devices, self._timeout = list(devices), timeout
        self._allows_threads, self._measures = how != "inorder", how == "auto"
        self._on_left_behind = on_left_behind
        self._names = replica_names(devices) if names is None else names
        self._is_on_one_device = len(set(devices)) == 1
        self._is_on_cpu = all(device.type == "cpu" for device in devices)
        self._tuners: defaultdict[tuple[str, int], ExecutorTuner] = defaultdict(ExecutorTuner)
        self._latest: dict[str, tuple[bool, ExecutorTuner | None]] = {}  # choice for each kind
        self._workers: list[Worker] = []
        if self._allows_threads:
            watch_process_state()

    def choose(self, kind: str, count: int, *, in_order: bool = False) -> bool:
        """Chooses threads or in order for `count` calls of a kind, and for their backward.

        Always in order are: a single call, modules that need it (`in_order`), and calls under
        function modes, dispatch modes or saved tensor hooks, which rely on the order of operations.

        Returns:
            Whether in threads.
        """
        tuner, in_threads = None, self._allows_threads and count > 1 and not in_order
        if in_threads and any([count() for count in MODE_COUNTS]) and has_own_modes():
            in_threads = False
        elif in_threads and self._measures:
            # Who asks for deterministic algorithms wants every run to make the same choice.
            in_threads = not torch.are_deterministic_algorithms_enabled()
            if in_threads:
                tuner = self._tuners[kind, count]
                in_threads = tuner.begin()
        self._latest[kind] = in_threads, tuner
        return in_threads

    def run(
        self,
        kind: str,
        tasks: Sequence[Task],
        calls: Calls | None = None,
    ) -> list[Any]:
        """Makes the calls, at most one per replica, and waits for all of them.

        They run as the latest `choose` for this kind has decided, a backward as its forward.

        An error of a replica ends those that wait for it in a rendezvous; it is raised when all
        have ended, as it is, with a note that names replica, device, stage and samples. An
        interrupt waits some seconds for replicas that run; those that do not end are named, and
        their threads left behind. A second interrupt is raised at once.
        """
        calls = calls or Calls()
        calls.names, calls.timeout = self._names, self._timeout
        calls.is_terminated = self.is_terminated
        if kind not in self._latest:
            self.choose(kind, len(tasks))
        if not self._is_on_one_device:
            _seed_devices(self._devices)
        in_threads, tuner = self._latest[kind]
        in_threads &= len(tasks) > 1
        timer = None if tuner is None or not tuner.is_measured else DeviceTimer(self._devices)
        is_plain = self._is_on_cpu and not (
            torch.is_inference_mode_enabled()
            or torch.is_autocast_enabled("cpu")
            or any([count() for count in MODE_COUNTS])
        )
        state = None if is_plain else ThreadState(self._devices)
        collects = COLLECTS_ANYWHERE and in_threads and gc.isenabled()  # see the note
        if collects:
            gc.disable()
        try:
            calls.run(tasks, state, self._submit, in_threads=in_threads)
        except BaseException as interrupt:
            calls.end(interrupt)
            raise
        finally:
            if collects:
                gc.enable()
            if calls.broken is not None and (unended := calls.unended()):
                self._on_left_behind()
                workers = self._dismiss()  # later calls get new ones
                for task in unended:
                    workers[task.replica].leave_behind(task.name + task.context())
            results, error = calls.close()
        if tuner is not None and timer is not None:
            timer.end()
            tuner.add(timer)
        if calls.needs_turns is not None:
            self._allows_threads = False
            if in_threads:
                raise RuntimeError(calls.needs_turns) from error
        if error is not None:
            raise error
        return results

    def _submit(self, replica: int, work: Callable[[], None]) -> None:
        """Has a function called in a replica's worker; starts them if none live, as in a fork."""
        if not (self._workers and self._workers[replica].thread.is_alive()):
            self._workers = start_workers(self._devices)
        self._workers[replica].inbox.put(work)

    def is_in_threads(self, kind: str) -> bool:
        """Whether the latest calls of a kind ran in threads."""
        return self._latest.get(kind, (True, None))[0]

    def is_settled(self, kind: str | None = None) -> bool:
        """Whether calls of a kind, or of all, run as they will from now on."""
        tuners = [t for name, (_, t) in self._latest.items() if t and kind in (None, name)]
        return all([tuner.choice is not None for tuner in tuners])

    def _dismiss(self) -> list[Worker]:
        """Lets the workers go; each ends after its present call."""
        workers, self._workers = self._workers, []
        for w in workers:
            w.inbox.put(None)
        return workers

    def close(self) -> None:
        """Ends the workers; a later `run` starts new ones."""
        workers = self._dismiss()
        if not have_ended(workers, worker.GRACE_SECONDS):
            for w in workers:
                w.leave_behind(w.thread.name)


class ExecutorTuner:
    """Chooses threads or in order for one kind of call: measures both, then keeps the faster.

    Both take turns, a row of calls each; the first call of a row does not count, since it starts
    threads and fills caches. The first row is in order: it shows whether there is something in the
    calls that must not run in threads.

    Attributes:
        choice: whether the calls run in threads, once that is known.
        is_measured: whether the present call is measured.
    """

    ROW, ROWS = 4, 4

    def __init__(self) -> None:
        self.choice: bool | None = None
        self.is_measured = False
        self._calls: list[tuple[bool, list[DeviceTimer]]] = []  # in threads?, forward and backward

    def begin(self) -> bool:
        """Chooses for the next call; returns whether it runs in threads."""
        if self.choice is None:
            row, k = divmod(len(self._calls), self.ROW)
            self.is_measured = k > 0
            if row < self.ROWS:
                self._calls.append((row % 2 == 1, []))
                return row % 2 == 1
            self.choice = self._median(in_threads=True) <= self._median(in_threads=False)
        return self.choice

    def add(self, timer: DeviceTimer) -> None:
        """Adds to the time of the present call."""
        self._calls[-1][1].append(timer)

    def _median(self, *, in_threads: bool) -> float:
        """The seconds that a call took which was made in threads, or in order."""
        calls = [timers for way, timers in self._calls if way == in_threads and timers]
        for timer in [timer for timers in calls for timer in timers]:
            timer.wait()
        return statistics.median([sum([t.seconds for t in timers]) for timers in calls] or [0.0])


# The replicas' calls in one apply, see the note above

NOT_BEGUN, BEGINNING = "has not begun", "is about to begin"
RUNNING, ENDED = "is still running", "has ended"
"""The states of a replica that does not wait in a rendezvous, as errors say them."""
IN_WORKER = ', in a worker thread; executor="inorder" runs replicas in the calling thread'

Act: TypeAlias = Callable[["Calls", list[Any]], Sequence[Any]]
"""What the main thread does in a rendezvous: from the replicas' values to what each one gets."""
Reply: TypeAlias = tuple[Any, BaseException | None]  # a value, or an error to raise

PARTICIPANT: ContextVar[Task | None] = ContextVar("participant", default=None)
current_participant: Callable[[], Task | None] = PARTICIPANT.get
"""The replica whose call runs here; None outside of replicas."""


class RendezvousError(RuntimeError):
    """The replicas did not all come to the same rendezvous."""


class Arrival(NamedTuple):
    """The state of a replica that waits in a rendezvous."""

    what: str
    value: Any
    act: Act
    is_grad_enabled: bool
    is_inference: bool
    stream: torch.Stream | None  # that it computes on; None on the CPU
    since: float  # `time.perf_counter`


@dataclass(eq=False)
class Task:
    """A call for one replica, and where the replica stands in the apply that makes the call."""

    replica: int
    device: torch.device
    call: Callable[[], Any]
    context: Callable[[], str] = str  # continues the note "in replica 2 on cuda:1" of an error
    spans: list[DeviceTimer] | None = None  # gets the times of the device's work, if measured

    seconds: float = field(default=0.0, init=False)  # of work, without waiting in rendezvous
    result: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    calls: Calls = field(init=False)
    state: str | Arrival = field(default=NOT_BEGUN, init=False)
    on_main_thread: bool = field(default=False, init=False)  # the call runs on the main thread
    reply: Reply | None = field(default=None, init=False)  # that it gets at its next turn
    inbox: SimpleQueue[Reply] = field(default_factory=SimpleQueue, init=False)
    # Of shared generators, as a checkpoint has saved them.
    random_states: dict[torch.device, Tensor] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        """Its number and device, for errors."""
        return replica_text(self.replica, self.calls.names)

    def run(self) -> None:
        """Makes the call on this thread; an error is raised again when all replicas have ended."""
        token, start = PARTICIPANT.set(self), time.perf_counter()
        try:
            if self.spans is not None:
                self.spans.append(DeviceTimer([self.device]))
            self.result = self.call()
            self.call = str  # a graph is freed fastest where it ran
            for device, state in self.random_states.items():
                if not torch.equal(state, _random_state(device)):
                    self.calls.needs_turns = CHECKPOINT
        except BaseException as error:
            self.error = error
        finally:
            if self.spans:
                self.spans[-1].end()
            self.seconds += time.perf_counter() - start
            PARTICIPANT.reset(token)

    def meet(self, what: str, value: Any, act: Act) -> Any:
        """Waits until all replicas have come to the rendezvous `what`; returns this one's result.

        `act(calls, values)` is called once, on the main thread, with the values of all replicas in
        their order, and returns one result for each. It runs in the grad and inference mode of this
        call. An error of `act` is raised in all of them.
        """
        start = time.perf_counter()
        self.calls.check()
        if self.spans:
            self.spans[-1].end()
        stream = None if self.device.type == "cpu" else current_stream(self.device)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        try:
            self.state = Arrival(what, value, act, *modes, stream, start)
            result, error = self.calls.wait_for_others(self)
        finally:
            if self.spans is not None:
                self.spans.append(DeviceTimer([self.device]))
            self.seconds -= time.perf_counter() - start
        if error is not None:
            raise error
        return result


class Calls:
    """The replicas' calls in one apply; `run` once, then `close`.

    Args:
        sizes: samples of these replicas; None if they are not known.
        dim: the dimension along which the batch was cut.
        world: the processes that have replicas; None if this is the only one.
    """

    names: Sequence[str] = ()  # of all replicas
    timeout = 1800.0  # seconds that replicas wait in a rendezvous for one that does not come
    is_terminated: Callable[[], bool] = staticmethod(lambda: False)  # see `Executor`
    one_by_one = False  # one replica runs at a time
    is_open = True  # some calls have not ended
    broken: BaseException | None = None  # the error that ends them all
    have_met = False
    needs_turns: str | None = None  # why these calls must not run in threads
    crossed = False  # the graph of one replica continues in that of another

    def __init__(
        self,
        sizes: Sequence[int] | None = None,
        dim: int = 0,
        world: World | None = None,
    ) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.dim, self.world = dim, world
        self.participants: list[Task] = []
        self._events: SimpleQueue[None] = SimpleQueue()

    # In the main thread

    def run(
        self,
        tasks: Sequence[Task],
        state: ThreadState | None,
        submit: Callable[[int, Callable[[], None]], None],
        *,
        in_threads: bool,
    ) -> None:
        """Makes all calls at once in the workers, or one after another here until one fails.

        `state` is the main thread's; None if it differs from a new thread's by the grad mode alone.
        """
        self._state, self._submit = state, submit
        self._grad, self._context = torch.is_grad_enabled(), contextvars.copy_context()
        self.one_by_one, self.participants = not in_threads, list(tasks)
        for task in tasks:
            task.calls = self
        for task in () if in_threads else tasks:
            if task.state is NOT_BEGUN:  # else a rendezvous has begun it in its worker
                task.on_main_thread, task.state = True, RUNNING
                if state is None:
                    task.run()
                else:
                    with state.moved_to(task.device):
                        task.run()
                task.state = ENDED
            if task.error is not None or self.broken is not None:
                break
        if in_threads or self.have_met:
            while self._first_error() is None and self._run_until_all_stop():
                self._act()
            if self.broken is None and (error := self._first_error()) is not None:
                self.end(error)

    def _run_until_all_stop(self) -> bool:
        """Runs every replica until it waits in a rendezvous or ends; returns whether one waits."""
        for task in self.participants:
            if task.state is NOT_BEGUN:
                task.state = BEGINNING
                self._submit(task.replica, partial(self._context.copy().run, self._work, task))
            elif task.reply is not None:
                reply, task.reply, task.state = task.reply, None, RUNNING
                task.inbox.put(reply)
            if self.one_by_one:
                self._wait_for([task])
        self._wait_for(self.participants)
        return self.broken is None and any([t.state is not ENDED for t in self.participants])

    def _wait_for(self, tasks: Sequence[Task]) -> None:
        """Waits until none of the tasks runs; an arrival that waits too long ends all calls."""
        running = (BEGINNING, RUNNING)
        while self.broken is None and any([task.state in running for task in tasks]):
            try:  # half a second at a time: on Windows, Ctrl-C cannot interrupt a longer wait
                self._events.get(timeout=min(self.timeout, 0.5))
            except Empty:
                since = [t.state.since for t in self.participants if type(t.state) is Arrival]
                limit = worker.GRACE_SECONDS if self.is_terminated() else self.timeout
                if since and time.perf_counter() - min(since) > limit:
                    self.end(self._mismatch(f" within {limit:g} seconds"))

    def _act(self) -> None:
        """All replicas stand still: acts for them; each gets its reply at its next turn."""
        arrivals = [t.state for t in self.participants if isinstance(t.state, Arrival)]
        if len(arrivals) < len(self.participants) or len({a.what for a in arrivals}) > 1:
            self.end(self._first_error() or self._mismatch())
            return
        first, streams = arrivals[0], {a.stream for a in arrivals if a.stream is not None}
        try:
            if len({stream.device for stream in streams}) < len(streams):
                raise RendezvousError(
                    f"Expected replicas of one device on one stream at {first.what}, got several."
                )
            with (
                on_streams([*streams]),  # on which the values were computed, and are used next
                torch.inference_mode(first.is_inference),
                torch.set_grad_enabled(first.is_grad_enabled),
            ):
                results = first.act(self, [arrival.value for arrival in arrivals])
            replies: list[Reply] = [(result, None) for result in results]
        except BaseException as error:
            replies = [(None, error)] * len(arrivals)
        for task, reply in zip(self.participants, replies, strict=True):
            task.reply = reply

    def end(self, error: BaseException) -> None:
        """Ends the replicas that wait, now and later, and waits for those that run.

        After an error of a replica for as long as that takes; after an interrupt, or if one did not
        come to a rendezvous, for `GRACE_SECONDS`.
        """
        if self.broken is None:
            self.broken = error
        is_error = isinstance(error, Exception) and not isinstance(error, RendezvousError)
        deadline = time.perf_counter() + (math.inf if is_error else worker.GRACE_SECONDS)
        for task in self.unended():
            task.reply = None
            task.inbox.put((None, self._stopped()))
        while self.unended() and (left := deadline - time.perf_counter()) > 0:
            with suppress(Empty):
                self._events.get(timeout=min(left, 0.5))

    def unended(self) -> list[Task]:
        """The tasks that run or wait in workers; one that is only beginning will end at once."""
        states = (NOT_BEGUN, BEGINNING, ENDED)
        return [t for t in self.participants if not (t.on_main_thread or t.state in states)]

    def close(self) -> tuple[list[Any], BaseException | None]:
        """Ends the apply; returns the replicas' results, and the error with a note from where."""
        tasks, error = self.participants, self._first_error()
        results = [task.result for task in tasks]
        failed = [task for task in tasks if task.error is error]
        if error is not None and failed and not isinstance(error, RendezvousError):
            in_worker = "" if failed[0].on_main_thread else IN_WORKER
            add_note(error, f"[in {failed[0].name}{failed[0].context()}{in_worker}]")
        self.is_open, self.participants, self.broken = False, [], None
        for task in tasks:  # workers may keep the latest one; it refers to a batch and to graphs
            task.result = task.error = task.reply = None
            del task.call, task.context
        return results, error

    def _first_error(self) -> BaseException | None:
        """The error that ends all calls, or the first replica's own."""
        for task in self.participants if self.broken is None else ():
            if task.error is not None:
                return task.error
        return self.broken

    def _mismatch(self, within: str = "") -> RendezvousError:
        states = [(task.name, task.state) for task in self.participants]
        what = next(state.what for _, state in states if isinstance(state, Arrival))
        got = [f"{name} {s if isinstance(s, str) else f'is at {s.what}'}" for name, s in states]
        return RendezvousError(
            f"Expected all replicas at {what}{within}, got: {', '.join(got)}. Make the same calls "
            "in the same order on every replica: they must not depend on its samples."
        )

    # In the replicas' threads

    def _work(self, task: Task) -> None:
        """Makes a replica's call in its worker."""
        task.state = RUNNING  # first: `end` looks at it after it has set `broken`
        try:
            if self.broken is not None or not self.is_open:
                raise self._stopped()
            state = self._state
            with (
                torch.set_grad_enabled(self._grad) if state is None else state.entered(task.device)
            ):
                task.run()
        except BaseException as error:  # also where the thread's state could not be entered
            task.error = task.error or error
        task.state = ENDED
        self._events.put(None)

    def wait_for_others(self, task: Task) -> Reply:
        """Waits, for a replica that has arrived, until the main thread has acted."""
        self.have_met = True
        if not task.on_main_thread:
            self._events.put(None)
            return task.inbox.get()
        if self._run_until_all_stop():  # this is the main thread
            self._act()
        self.check()
        reply, task.reply, task.state = task.reply, None, RUNNING
        assert reply is not None
        return reply

    def check(self) -> None:
        """Raises an error if the calls have ended or are to end."""
        if not self.is_open or self.broken is not None:
            raise self._stopped()

    def _stopped(self) -> RendezvousError:
        """The error for a replica that cannot run on because of others."""
        if isinstance(self.broken, RendezvousError):
            return self.broken
        return RendezvousError(
            "Expected all replicas to meet, but one of them has failed, the run was interrupted, "
            "or the step has ended."
        )


# What torch has once for all threads

_ONE_PER_PROCESS = (
    "Expected no {0} where replicas run in threads, got one: torch has one {1} for the whole "
    'process, which replicas would change for each other. Choose executor="inorder", or {2}.'
)
CHECKPOINT = _ONE_PER_PROCESS.format(
    "activation checkpoint (torch.utils.checkpoint) or fork_rng where a step draws random numbers",
    "generator per device",
    "preserve_rng_state=False",
)
DUAL_LEVEL = _ONE_PER_PROCESS.format(
    "forward-mode derivative (torch.func.jvp, jacfwd, hessian, forward_ad.dual_level)",
    "level of them",
    "reverse mode (torch.func.vjp, jacrev)",
)


@cache
def watch_process_state() -> None:
    """Wraps two functions of torch, for good, so that replicas that need them run in order.

    A checkpoint saves the random state by `torch.get_rng_state`, and draws from it again in its
    backward. If replicas in threads share the generator, its forward has had other numbers, mixed
    with theirs. `enter_dual_level` begins a forward-mode derivative; there is one level at a time
    for all threads.
    """
    module: Any = torch
    forward_ad = module.autograd.forward_ad
    read, enter = torch.get_rng_state, forward_ad.enter_dual_level

    def get_rng_state() -> Tensor:
        task = _one_of_several()
        if task is not None and backward_id() < 0 and not task.random_states:
            devices = [other.device for other in task.calls.participants]
            shared = {CPU, *[device for device in devices if devices.count(device) > 1]}
            task.random_states = {device: _random_state(device) for device in shared}
        return read()

    def enter_dual_level() -> Any:
        task = _one_of_several()
        if task is not None:
            task.calls.needs_turns = DUAL_LEVEL
            if not task.on_main_thread:
                raise RuntimeError(DUAL_LEVEL)
        return enter()

    module.get_rng_state = get_rng_state
    forward_ad.enter_dual_level = enter_dual_level


def _one_of_several() -> Task | None:
    """The replica whose call runs here, if there are others in this apply."""
    task = current_participant()
    return None if task is None or len(task.calls.participants) < 2 else task


def _random_state(device: torch.device) -> Tensor:
    module: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
    state: Tensor = module.get_rng_state()
    return state


def _seed_devices(devices: Sequence[torch.device]) -> None:
    """Gives each device but the root a seed of its own, derived from the root's.

    `torch.manual_seed` gives all of them the same, and with it the same dropout masks.
    """
    generators = [
        torch.get_device_module(device).default_generators[device.index]
        for device in dict.fromkeys(devices)
    ]
    root = generators[0].initial_seed()
    for place, generator in enumerate(generators[1:], 1):
        if generator.initial_seed() == root:
            generator.manual_seed(seed_apart(root, place))
