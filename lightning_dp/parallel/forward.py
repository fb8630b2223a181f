"""Forward mode: the user's step runs once; each call of the module runs on all replicas."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.comm import on_streams, side_streams
from lightning_dp.parallel.contexts import StandIn, replaced
from lightning_dp.parallel.engine import Engine, ReplicaCall
from lightning_dp.parallel.gather import Scalars
from lightning_dp.parallel.scatter import Shards, to_device_together, tree
from lightning_dp.parallel.torch_private import (
    COMPILED_CALL,
    backward_id,
    compiled_forward,
    more_recompilations,
    not_compiled,
)

OWN_METHODS = ("batch_size", "split_batch", "sample_cost")


class ForwardParallel(Engine):
    """Spreads calls of a module over its replicas; what they return is gathered.

    While `spreading` lasts, `module(x)` cuts its arguments, runs `forward` on all replicas and
    joins the outputs on the output device, in one graph: every backward reaches the module's own
    parameters and the arguments. Hooks of the module itself see whole arguments and outputs.

    0-dim outputs are stacked to shape [K], one entry for each replica that had samples, unless
    `overrides` or `scalars` say otherwise. A call without anything to cut runs on the root alone.
    Calls of the `parallel_modules` are spread too, where they do not come from a call that is
    spread already. A module whose call is spread may say by `batch_size`, `split_batch` and
    `sample_cost` how its arguments are cut; else the root's methods are asked.

    Before each call, replicas get all parameters known to have changed, and after a backward all
    trained ones. In training mode or with gradients enabled, frozen parameters
    (requires_grad=False) are copied too. Other writes through `.data` need a `resync`.

    Attributes:
        num_calls, num_cut: how many calls there were so far, and of how many something was cut.
        first_calls: looks at each call before it is spread, as `first_step.FirstCalls` does.
        turn: one thread spreads calls at a time: checkpoints do so in autograd's threads.

    Example:
        >>> cpu = torch.device("cpu")
        >>> net = nn.Linear(3, 2)
        >>> engine = ForwardParallel(net, [cpu] * 2, output_device=cpu, split=lambda n: (n - 1, 1))
        >>> with engine.spreading():
        ...     net(torch.randn(8, 3)).sum().backward()
        >>> engine.last_sizes, net.bias.grad
        ((7, 1), tensor([8., 8.]))
        >>> engine.close()
    """

    num_calls = num_cut = 0
    first_calls: Any = None
    _spread: ExitStack | None = None  # gives the modules their own forwards back
    _mode: tuple[bool, bool] | None = None  # of the latest call: training, with gradients
    _streams: Sequence[torch.Stream] = ()  # the caller's own

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        parallel_modules: Sequence[str] = (),
        scalars: Scalars = "stack",
        **options: Any,
    ) -> None:
        _check_names(module, parallel_modules)
        super().__init__(module, devices, scalars=scalars, **options)
        self._paths = list(dict.fromkeys(["", *parallel_modules]))
        self.turn = threading.RLock()

    @contextmanager
    def spreading(self) -> Iterator[None]:
        """Spreads the module's calls while it lasts."""
        if self._spread is not None:
            yield
            return
        # Compiled code may also be called with whole batches, beside the replicas' calls.
        compiles = self.replicas.compiles
        with more_recompilations(len(self.devices)) if compiles else nullcontext():
            self._start_spreading()
            try:
                yield
            finally:
                self._stop_spreading()

    def _start_spreading(self) -> None:
        self._spread = ExitStack()
        for path in self._paths:
            module = self.module.get_submodule(path)
            call = StandIn(module, "forward", partial(_spread, self, path))
            self._spread.enter_context(replaced(module, **{"forward": call, COMPILED_CALL: None}))

    def _stop_spreading(self) -> None:
        if self._spread is not None:
            self._spread.close()
            self._spread = None

    def spread(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Makes a spread call; replica 0, which is the module, calls its own forward meanwhile."""
        with self.turn:
            is_spreading = self._spread is not None  # False for a checkpoint that calls again
            self._stop_spreading()
            try:
                return self.call(path, args, kwargs)
            finally:
                if is_spreading:
                    self._start_spreading()

    @property
    def is_training(self) -> bool:
        """Whether any part of the module is in training mode."""
        return any(module.training for module in self.replicas.submodules[0])

    def call(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls `forward` of the submodule `path` on all replicas, or on the root alone."""
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if any(isinstance(leaf, nn.Module) for leaf in tree.leaves(arguments)):
            paths = {module: path for path, module in self.module.named_modules()}
            arguments = tree.map_leaves(
                lambda x: OwnPart(paths[x]) if isinstance(x, nn.Module) and x in paths else x,
                arguments,
            )
        again = backward_id() >= 0  # a checkpoint calls again, in a thread of autograd
        self.num_calls += 1
        if not again:
            self._streams = side_streams([*self.devices, self.output_device])
        called = self.module.get_submodule(path)
        decides = any([callable(getattr(called, name, None)) for name in OWN_METHODS])
        with on_streams(self._streams), replaced(self, asked=called if decides else self.module):
            if self.first_calls is not None and not again:
                self.first_calls.before(self, path, len(args), arguments)
            mode = (self.is_training, torch.is_grad_enabled())
            if mode != self._mode and not again:
                self.resync()  # weights may be swapped here by `.data.copy_`, unseen
            self._mode = mode
            call = SpreadCall(self, path, len(args), training=mode[0])
            # Code outside of the replicas may write weights between two calls, through `.data` too.
            # Not where a checkpoint calls again: others of autograd's threads work with them.
            if any(mode) and not again:
                call.resends_frozen = True
            return self.run(call, arguments)

    def close(self) -> None:
        """Closes the engine, and drops the replicas and the graphs that they hold."""
        self._stop_spreading()
        super().close()
        self.replicas.drop()


@not_compiled  # compiled code may call the module, and would have the engine compiled
def _spread(engine: ForwardParallel, path: str, *args: Any, **kwargs: Any) -> Any:
    return engine.spread(path, args, kwargs)


class OwnPart:
    """An argument that is a part of the module: each replica gets its own."""

    def __init__(self, path: str) -> None:
        self.path = path


class SpreadCall(ReplicaCall):
    """Calls `forward` of a submodule on all replicas, each with its shard of the arguments.

    These are one dict; the first `num_args` go by position.
    """

    is_one_graph = True

    def __init__(
        self, engine: ForwardParallel, path: str, num_args: int, *, training: bool
    ) -> None:
        super().__init__(f"{path}.forward".lstrip("."), training=training)
        self._engine, self.path, self._num_args = engine, path, num_args

    def begin(self, shards: Shards) -> None:
        """Puts the replicas inside the root's graph."""
        # Not the engine itself: a graph that reaches what holds it is never freed.
        after_backward = partial(_after_backward, weakref.ref(self._engine))
        self._engine.replicas.connect(shards.active, after_backward)

    def on_replica(self, module: nn.Module, shard: Mapping[int | str, Any]) -> Any:
        """The replica's `forward`."""
        given = shard
        if any(isinstance(leaf, OwnPart) for leaf in tree.leaves(shard)):
            given = tree.map_leaves(
                lambda x: module.get_submodule(x.path) if isinstance(x, OwnPart) else x, shard
            )
        rest = {name: value for name, value in given.items() if isinstance(name, str)}
        args = map(given.get, range(self._num_args))
        return compiled_forward(module.get_submodule(self.path))(*args, **rest)

    def gather(self, outputs: list[Any], shards: Shards) -> Any:
        """Joined; what the root has returned alone stays as it is."""
        if shards.whole:
            return to_device_together(outputs, self._engine.output_device)[0]
        self._engine.num_cut += 1
        return self._engine.join(outputs, shards)


def _after_backward(engine: Callable[[], ForwardParallel | None]) -> None:
    """Gives the root the step's buffers, and expects that its weights are updated next."""
    living = engine()
    if living is not None:
        living.reducer.take_buffers()
        living.replicas.mark_stale(trained_only=True)


def _check_names(module: nn.Module, names: Sequence[str]) -> None:
    """Raises a ValueError unless all names are those of submodules."""
    known = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in known:
            raise ValueError(
                f"parallel_modules: expected names of submodules of {type(module).__qualname__}, "
                f"such as {known[:4]}, got {name!r}. Correct the name."
            )
