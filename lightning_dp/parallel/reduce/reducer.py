"""Reducer: brings gradients and buffers from the replicas to the root, at the right time.

A joint loss is sum(w_i * loss_i), so gradients are summed, not averaged: the weights are already in
them. `JointBackward` is its backward, each run of which is a `Backward`, with commit and abort.

[Note: one backward per replica on the CPU] Autograd runs a joint backward of CPU graphs on the
calling thread, so K replicas would queue. Each replica's backward therefore runs in its own worker.
Accelerators have an autograd thread per device: there one joint backward runs them all at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dp.parallel.apply import Task
from lightning_dp.parallel.comm import are_accelerators, gradients_on, on_streams, side_streams
from lightning_dp.parallel.reduce.buffers import Buffers, BufferSnapshot, reduce_buffers
from lightning_dp.parallel.reduce.overlap import Overlap
from lightning_dp.parallel.replicate import BufferCopies, Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import (
    add_to_each,
    backward_id,
    hooked,
    keeps_graph,
    put_hooks_back,
    take_hooks_off,
    will_run,
)

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import World

_GRAD: Callable[[Tensor], Tensor | None] = attrgetter("grad")


class Reducer:
    """Brings gradients and buffers to the root, and remembers which of both are still missing.

    Args:
        replicas: the root and its replicas.
        devices: theirs.
        buffers: whose buffers the root gets, see `reduce_buffers`.
        world: the processes, whose gradients and buffers are added; None if this is the only one.

    Attributes:
        backward: the one that runs, or has failed.
        rank_samples: of each rank, until the ranks have reduced the step's buffers.
        snapshot: the root's buffers at the beginning of the present step, if it may be undone.
    """

    overlaps = True  # gradients leave accelerators while the backward runs
    snapshot: BufferSnapshot | None = None

    def __init__(
        self,
        replicas: Replicas,
        devices: Sequence[torch.device],
        buffers: Buffers,
        world: World | None = None,
    ) -> None:
        self._replicas, self._devices = replicas, devices
        self._policy, self._world = buffers, world
        # Where memory can run out, what a step has written must be put back.
        self._can_fail = any(device.type != "cpu" for device in devices)
        self._pending: Shards | None = None  # of the latest forward, until `take_buffers`
        self.backward: Backward | None = None
        self.rank_samples: Sequence[int] | None = None

    # One step

    def begin_step(self, shards: Shards, *, training: bool) -> BufferCopies:
        """Ends the step before; returns which buffers the replicas get."""
        self.settle()
        if not training:
            return "changed"
        if self._can_fail:
            self.snapshot = BufferSnapshot(self._replicas.root_buffers)
        return "read" if self._root_keeps_its_buffers(shards) else "all"

    def after_forward(self, shards: Shards) -> None:
        """Notes whose buffers the root gets, after the backward or before the next step.

        Without gradients no backward will come, and it gets them now. A backward that the step ran
        itself has left gradients on replicas, which the root gets now.
        """
        self._pending = shards
        reduce_gradients(self._replicas.parameters)
        if not torch.is_grad_enabled():
            self.take_buffers()

    def begin(self, joint: JointBackward, gradient: Tensor) -> None:
        """A backward begins."""
        filled: Sequence[int] = ()
        if self._can_fail and self.overlaps:
            filled = joint.shards.active if joint.crosses else [k for k, *_ in joint.parts]
        self.backward = Backward(
            self._replicas, gradient, filled, can_be_undone=self._can_fail, world=self._world
        )

    def commit(self) -> None:
        """The backward has ended: its gradients, and the step's buffers, reach the root."""
        if self.backward is not None:
            self.backward.commit()
            self.backward = None
        self._finish()

    def abort(self) -> None:
        """The backward has failed; it stays known until `undo` or `settle`."""
        if self.backward is not None:
            self.backward.abort()

    def undo(self) -> None:
        """Takes back what a step has left that is to be run again."""
        self._discard()
        self._pending = None
        if self.snapshot is not None:
            self.snapshot.restore()

    def settle(self) -> None:
        """Ends a step whose backward did not run or has failed."""
        if self.backward is not None:
            if backward_id() >= 0:  # a checkpoint calls the module again
                return
            wait_for_autograd(self._devices)
            self._discard()
        self._finish()

    def close(self) -> None:
        """Ends what is open, in this process alone: after an error the others do not come."""
        self._world = self.rank_samples = None
        self.settle()

    def _discard(self) -> None:
        if self.backward is not None:
            self.backward.discard()
            self.backward = None

    # Buffers

    def _root_keeps_its_buffers(self, shards: Shards) -> bool:
        """With policy "first", if the root had samples: then it is the first that worked."""
        return self._policy == "first" and bool(shards.sizes[0])

    def take_buffers(self) -> None:
        """Gives the root the buffers of a step, if it has not got them.

        Not before the backward, which checks that nothing it has saved was written to.
        """
        shards, self._pending = self._pending, None
        if shards is not None and not self._root_keeps_its_buffers(shards):
            buffers = self._replicas.buffers
            worked = [buffers[k] for k in shards.active]
            reduce_buffers(buffers[0], worked, shards.active_sizes, self._policy)

    def _finish(self) -> None:
        """Gives the root the step's buffers, and all ranks the same ones."""
        if self._pending is not None:
            self.take_buffers()
        samples, self.rank_samples = self.rank_samples, None
        if samples is not None and self._world is not None:
            root = self._replicas.buffers[0]
            rows = zip(self._world.all_gather_objects(root, "its buffers"), samples, strict=True)
            worked = [(row, n) for row, n in rows if n]
            reduce_buffers(root, [row for row, _ in worked], [n for _, n in worked], self._policy)


# The joint loss


class JointBackward:
    """The backward of a joint loss. Only it holds the replicas' graphs, and frees them on OOM.

    Args:
        name: of the step, for errors.
        shards: the batch.
        parts: replicas, their losses, and the weights of these in the joint loss. Losses of weight
            0 are left out: the gradient of a mean over nothing would be NaN.
        run: the engine's method that runs it, held weakly: a graph that reaches its own holder is
            never freed.
        devices: accelerators, on whose present current streams the backward runs.
        crosses: whether one replica's graph continues in another's, so that they cannot run alone.
    """

    def __init__(
        self,
        name: str,
        shards: Shards,
        parts: Iterable[tuple[int, Tensor, float]],
        run: Callable[[JointBackward, Tensor, bool], None],
        devices: Sequence[torch.device],
        *,
        crosses: bool = False,
    ) -> None:
        self.name, self.shards, self.crosses = name, shards, crosses
        self.parts = [(k, loss, w) for k, loss, w in parts if w != 0 and loss.requires_grad]
        self._is_freed = False
        self._run = weakref.WeakMethod(run)
        self._streams = side_streams(devices) if devices else []

    def attach(self, joint: Tensor, requested: Sequence[Tensor] = ()) -> Tensor:
        """A loss of the value `joint`, which has no graph yet, whose backward is this one.

        Parameters in `requested` become inputs of its node, so that `backward(inputs=...)` for
        these reaches it, and is refused.
        """
        return _joint_loss(joint.requires_grad_(), self, *requested)

    def __call__(self, gradient: Tensor, keep_graph: bool) -> None:
        """Runs it, given the joint loss's gradient and whether graphs are kept."""
        run = self._run()
        if run is None:
            raise RuntimeError("Expected a loss whose engine still exists, got one that is gone.")
        if self._is_freed:
            raise RuntimeError(
                "Trying to backward through the graph a second time, after its first backward has "
                "freed it. Call the first one with retain_graph=True."
            )
        self._is_freed = not keep_graph
        try:
            # Autograd's thread has other current streams.
            with on_streams(self._streams) if self._streams else nullcontext():
                run(self, gradient, keep_graph)
        except torch.OutOfMemoryError:
            self.parts.clear()
            self.shards.parts.clear()
            raise

    def tasks(
        self, gradient: Tensor, keep_graph: bool, devices: Sequence[torch.device]
    ) -> list[Task]:
        """The replicas' backwards, see the note. They alone hold graphs that are not kept."""
        tasks = []
        for k, loss, weight in self.parts:
            backward = partial(loss.backward, gradient * weight, retain_graph=keep_graph)
            tasks.append(Task(k, devices[k], backward, partial(self.shards.place, "backward", k)))
        if not keep_graph:
            self.parts.clear()
        return tasks

    def run_together(self, gradient: Tensor, keep_graph: bool) -> None:
        """One backward of all graphs."""
        # Nothing overwrites the new tensor `gradient * w` while the copy is in flight. The CPU,
        # which does not wait for the device, gets it when it has arrived.
        gradients = [
            (gradient * w).to(loss, non_blocking=loss.device.type != "cpu")
            for _, loss, w in self.parts
        ]
        losses = [loss for _, loss, _ in self.parts]
        torch.autograd.backward(losses, gradients, retain_graph=keep_graph)


class _JointLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, backward: JointBackward, *requested: Tensor) -> Tensor:
        ctx.joint_backward = backward
        ctx.num_inputs = 2 + len(requested)
        return joint.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Expected a backward without create_graph=True: sums over replicas have no graph. "
                "Take second derivatives by torch.autograd.grad inside training_step."
            )
        leaf, _ = ctx.next_functions[0]  # of `joint`; `inputs=` leaves it out
        if not will_run(leaf):
            raise RuntimeError(
                "Expected loss.backward() for all parameters of the module, got inputs=... or "
                "torch.autograd.grad. Take such gradients inside training_step, or use "
                'DataParallelStrategy(mode="forward").'
            )
        ctx.joint_backward(gradient, keeps_graph())
        return (None,) * int(ctx.num_inputs)


_joint_loss: Callable[..., Tensor] = _JointLoss.apply


def wait_for_autograd(devices: Sequence[torch.device]) -> None:
    """Waits until autograd's threads are done with a backward that has failed.

    Autograd raises the first error while the threads of other devices still work. A small backward
    of all devices queues behind their work: in a new thread it has the lowest sequence numbers,
    which come last. Never call it inside a backward, whose own thread would wait for itself.
    """

    def pass_through() -> None:
        ends = [torch.zeros(0, device=device, requires_grad=True) for device in others]
        clones = [end.clone() for end in ends]
        torch.autograd.grad(clones, ends, [torch.zeros_like(end) for end in ends])

    if others := [device for device in dict.fromkeys(devices) if device.type != "cpu"]:
        # A daemon thread, not a pool's, which the interpreter's exit would wait for.
        thread = threading.Thread(target=pass_through, name="dp-autograd", daemon=True)
        thread.start()
        while thread.is_alive():  # on Windows, Ctrl-C cannot interrupt a longer wait
            thread.join(0.5)


# One backward


class Backward:
    """Made when a backward begins; `commit` ends it, or after an error `abort` and `discard`.

    While it runs, the hooks of the root's parameters are off: autograd would call them with the
    root's part of the gradient. `commit` calls them with the sums, also while gradients accumulate.

    Args:
        replicas: the root and its replicas.
        gradient: of the joint loss.
        filled: the replicas whose gradients are reduced while it runs; empty if none are.
        can_be_undone: whether it may run out of memory and be run again.
        world: the processes, whose gradients are added to the local sums.
    """

    def __init__(
        self,
        replicas: Replicas,
        gradient: Tensor,
        filled: Sequence[int],
        *,
        can_be_undone: bool,
        world: World | None,
    ) -> None:
        self.gradient = gradient
        self._rows, self._world = replicas.parameters, world
        root = self._rows[0]
        self._hooks = SuspendedHooks(root) if hooked(root) else None
        # What earlier backwards have left, where it must not be mixed with this one's sums.
        self._earlier: StashedGradients | None = None
        if can_be_undone or self._hooks or world is not None:
            self._earlier = StashedGradients(root)
        self._overlap: Overlap | None = None
        if 0 in filled and not self._hooks:  # `add_up` writes into the root's gradients
            rows = [*{id(row): row for row in map(replicas.parameters_of, filled)}.values()]
            devices = list(dict.fromkeys(row[0].device for row in rows))
            if len(devices) > 1 and are_accelerators(devices):
                self._overlap = Overlap(rows, replicas.packing)

    def commit(self) -> None:
        """Brings the sums to the root: of the replicas, then of all ranks."""
        if self._overlap is not None:
            self._overlap.end()
        reduce_gradients(self._rows)
        if self._world is not None:
            from lightning_dp.parallel.processes import sum_gradients

            sum_gradients(self._rows[0], self._world)
        if self._hooks is not None:
            self._hooks.put_back()
            self._hooks.call_with_gradients()
        if self._earlier is not None:  # until here it could still be undone
            self._earlier.add()
            self._earlier = None
        if self._hooks is not None:
            self._hooks.call_after_accumulation()

    def abort(self) -> None:
        """Gives the root its earlier gradients and its hooks back, once.

        Waits for nothing: this may be one of autograd's threads.
        """
        if self._earlier is not None:
            self._earlier.put_back()
            self._earlier = None
        if self._hooks is not None:
            self._hooks.put_back()

    def discard(self) -> None:
        """Drops what it has left on the replicas; autograd's threads have to be done."""
        self.abort()
        if self._overlap is not None:
            self._overlap.end(failed=True)
        clear_gradients(chain.from_iterable(self._rows[1:]))


class StashedGradients:
    """The gradients of earlier backwards, set aside while another backward fills `.grad`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._earlier = list(map(_GRAD, self._parameters))
        clear_gradients(self._parameters)

    def put_back(self) -> None:
        """Only the earlier gradients remain."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = earlier

    def add(self) -> None:
        """Adds the new gradients to the earlier ones, in place, as accumulation does."""
        new = list(map(_GRAD, self._parameters))
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier
        _add(list(self._earlier), new)


class SuspendedHooks:
    """Takes the hooks of parameters off them until `put_back`: autograd calls none of them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._hooks = [(parameters[i], take_hooks_off(parameters[i])) for i in hooked(parameters)]
        self._are_off = True

    def put_back(self) -> None:
        """Autograd calls them again."""
        for parameter, hooks in self._hooks if self._are_off else ():
            put_hooks_back(parameter, hooks)
        self._are_off = False

    def call_with_gradients(self) -> None:
        """Calls the tensors' hooks with their new gradients, which they may replace.

        Parameters without one are left out from here on.
        """
        self._hooks = [(p, hooks) for p, hooks in self._hooks if p.grad is not None]
        for parameter, hooks in self._hooks:
            gradient: Any = parameter.grad
            for hook in (hooks.on_gradient or {}).values():
                answer = hook(gradient)
                gradient = gradient if answer is None else answer
            parameter.grad = gradient

    def call_after_accumulation(self) -> None:
        """Calls the hooks that see the parameter once its gradient has been accumulated."""
        for parameter, hooks in self._hooks:
            for hook in (hooks.on_parameter or {}).values():
                hook(parameter)


# Sums


def reduce_gradients(parameters: Sequence[Sequence[Tensor]]) -> None:
    """Adds the replicas' gradients to the root's, in place, and clears theirs.

    A parameter without a gradient on any replica keeps None.

    Args:
        parameters: of each replica, the root's first.
    """
    if len(parameters) == 1:
        return
    root = parameters[0]
    rows = [(replica, list(map(_GRAD, replica))) for replica in parameters[1:]]
    filled = [(replica, row) for replica, row in rows if {*row} - {None}]
    if not filled:
        return
    before = list(map(_GRAD, root))
    sums = list(before)
    for replica, row in filled:
        device = root[0].device
        _add(sums, row if replica[0].device == device else gradients_on(device, row))
        clear_gradients(replica)
    for parameter, total, old in zip(root, sums, before, strict=True):
        if total is not old:
            parameter.grad = total


def _add(sums: list[Tensor | None], row: Sequence[Tensor | None]) -> None:
    """Adds gradients to the sums; where there is no sum yet, the gradient becomes it."""
    pairs = []
    for i, gradient in enumerate(row):
        total = sums[i]
        if total is None:
            sums[i] = gradient
        elif gradient is not None:
            pairs.append((total, gradient))
    # foreach refuses lazily conjugated or negated tensors.
    if any([t.is_conj() or t.is_neg() for t in chain.from_iterable(pairs)]):
        for total, gradient in pairs:
            total.add_(gradient)
    elif pairs:
        add_to_each([total for total, _ in pairs], [gradient for _, gradient in pairs])


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Sets gradients to None."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def single_threaded() -> Iterator[None]:
    """While it lasts, torch uses no team of OpenMP threads: they would spin beside the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
