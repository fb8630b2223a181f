"""Forward mode: the user's step runs once; each call of the module runs on all replicas."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lightning_dp.parallel.call import ReplicaCall
from lightning_dp.parallel.comm import on_streams, side_streams
from lightning_dp.parallel.contexts import StandIn, replaced
from lightning_dp.parallel.engine import Engine
from lightning_dp.parallel.gather import Scalars
from lightning_dp.parallel.scatter import Shards, to_device_together
from lightning_dp.parallel.torch_private import (
    COMPILED_CALL,
    compiled_forward,
    is_in_backward,
    not_compiled,
)

OWN_METHODS = ("batch_size", "split_batch", "sample_cost")


class FirstCalls(Protocol):
    """What looks at calls before they are spread; see `check`."""

    def before(
        self, engine: ForwardParallel, path: str, num_args: int, arguments: dict[Any, Any]
    ) -> None:
        """A submodule is about to be called; the first arguments go by position."""


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

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        parallel_modules: Sequence[str] = (),
        scalars: Scalars = "stack",
        **options: Any,
    ) -> None:
        check_parallel_modules(module, parallel_modules)
        super().__init__(module, devices, scalars=scalars, **options)
        self.num_calls = self.num_cut = 0  # so far, and of these the ones that were cut
        self.first_calls: FirstCalls | None = None  # the check of them, if there is one
        self._paths = list(dict.fromkeys(["", *parallel_modules]))
        self._spread: ExitStack | None = None  # gives the modules their own forwards back
        self._mode: tuple[bool, bool] | None = None
        # One thread spreads calls at a time: checkpoints do so in autograd's threads.
        self.turn = threading.RLock()
        self._streams: list[torch.Stream] = []  # the caller's own

    @contextmanager
    def spreading(self) -> Iterator[None]:
        """Spreads the module's calls while it lasts."""
        if self._spread is not None:
            yield
            return
        # Compiled code may also be called with whole batches, beside the replicas' calls.
        compiles = self.replicas.compiled.are_known
        with self.replicas.compiled.as_often() if compiles else nullcontext():
            self._start_spreading()
            try:
                yield
            finally:
                self.stop_spreading()

    def _start_spreading(self) -> None:
        self._spread = ExitStack()
        for path in self._paths:
            module = self.module.get_submodule(path)
            call = StandIn(module, "forward", partial(_spread, self, path))
            attributes = {"forward": call, COMPILED_CALL: None}
            self._spread.enter_context(replaced(module, **attributes))

    def stop_spreading(self) -> None:
        """Gives the modules their own forwards back."""
        if self._spread is not None:
            self._spread.close()
            self._spread = None

    def spread(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Makes a spread call; replica 0, which is the module, calls its own forward meanwhile."""
        with self.turn:
            is_spreading = self._spread is not None  # False for a checkpoint that calls again
            self.stop_spreading()
            try:
                return self.call(path, args, kwargs)
            finally:
                if is_spreading:
                    self._start_spreading()

    def call(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls `forward` of the submodule `path` on all replicas, or on the root alone."""
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        self.num_calls += 1
        if not is_in_backward():
            self._streams = side_streams([*self.devices, self.output_device])
        called = self.module.get_submodule(path)
        decides = any([callable(getattr(called, name, None)) for name in OWN_METHODS])
        # A checkpoint calls again in a thread of autograd, which has other streams.
        with on_streams(self._streams), replaced(self, asked=called if decides else self.module):
            if self.first_calls is not None and not is_in_backward():
                self.first_calls.before(self, path, len(args), arguments)
            return self.run(self.make_spread_call(path, len(args)), arguments)

    @property
    def is_training(self) -> bool:
        """Whether any part of the module is in training mode."""
        return any([module.training for module in self.replicas.submodules[0]])

    def make_spread_call(self, path: str = "", num_args: int = 0) -> SpreadCall:
        """Makes the next `SpreadCall` and sets which parameters replicas must get first.

        Requests a full copy if training or grad mode has changed.
        """
        training = self.is_training
        mode = (training, torch.is_grad_enabled())
        if mode != self._mode and not is_in_backward():
            self.resync()  # weights may be swapped here, which leaves no trace everywhere
        self._mode = mode
        call = SpreadCall(self, path, num_args, training=training)
        # Code outside of the replicas may write weights between two calls, through `.data` too. Not
        # where a checkpoint calls again: other threads of the backward are at work with them.
        is_read_only = is_in_backward() or not any(mode)
        call.copied_parameters = "changed" if is_read_only else "frozen"
        return call

    def close(self) -> None:
        """Closes the engine, and drops the replicas and the graphs that they hold."""
        self.stop_spreading()
        super().close()
        self.replicas.lose()


@not_compiled  # compiled code may call the module, and would have the engine compiled
def _spread(engine: ForwardParallel, path: str, *args: Any, **kwargs: Any) -> Any:
    return engine.spread(path, args, kwargs)


class SpreadCall(ReplicaCall):
    """Calls `forward` of a submodule on all replicas, each with its shard of the arguments.

    These are one dict; the first `num_args` go by position.
    """

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
        rest = {name: value for name, value in shard.items() if isinstance(name, str)}
        args = map(shard.get, range(self._num_args))
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
        living.replicas.expect_change()


def check_parallel_modules(module: nn.Module, names: Sequence[str]) -> None:
    """Raises a ValueError unless all names are those of submodules."""
    known = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in known:
            raise ValueError(
                f"parallel_modules: expected names of submodules of {type(module).__qualname__}, "
                f"such as {known[:4]}, got {name!r}. Correct the name."
            )
