"""`DataParallel`: what `torch.nn.DataParallel` is used for, on the engine of forward mode."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn

from lightning_dp.checkpointing.state_keys import match_keys, normalize_state_dict
from lightning_dp.first_step import FirstCalls, Report, announce
from lightning_dp.parallel.apply import EXECUTORS, ExecutorName, fewest_samples
from lightning_dp.parallel.checks import check_choice, check_dim, check_module
from lightning_dp.parallel.devices import (
    DeviceLike,
    all_devices,
    memory_capacities,
    minus_one_is_cpu,
    resolve_devices,
    resolve_output_device,
)
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.functional import gather, parallel_apply, replicate
from lightning_dp.parallel.gather import Override, check_overrides
from lightning_dp.parallel.reduce import BUFFERS, Buffers
from lightning_dp.parallel.scatter import cut_for, infer_for, to_device
from lightning_dp.parallel.split import OwnSplit, Planner, SplitPolicy, check_split, split_policy
from lightning_dp.parallel.torch_private import not_compiled

Module = TypeVar("Module", bound=nn.Module)

STAGES = ("scatter", "replicate", "parallel_apply", "gather")


class DataParallel(nn.Module, Generic[Module]):
    """Spreads the calls of a module over several devices, for plain PyTorch.

    A drop-in for `torch.nn.DataParallel`: arguments are cut along `dim`, every device calls
    `forward` of its replica, and the outputs are joined on the output device; a backward fills
    the gradients of `module`. What is different: replicas are built once and kept; nothing is cut
    or dropped silently; dtypes of autocast and inference mode reach the replicas; parameters that
    a call did not use keep the gradient None; hooks of `module` itself see whole batches; it works
    on the CPU; and `state_dict()` has no prefix `module.`.

    A subclass may replace `scatter`, `replicate`, `parallel_apply` or `gather`. Its calls then go
    through these four, as in `torch.nn.DataParallel`: with new replicas and threads in each call.

    Args:
        module: the module. If it does not lie on the first device when it is called, it is moved
            there, with a warning.
        device_ids: the devices, root first: ids of the machine's accelerator, names or
            `torch.device`; an entry may repeat (`["cpu"] * 4`). None for all accelerators of the
            machine, or the CPU if it has none.
        output_device: where outputs end up: an id, a name or a `torch.device`, also `"cpu"` or a
            device outside of `device_ids`; None for the first device, -1 for the CPU.
        dim: the dimension along which arguments are cut and outputs joined.
        split: `"even"`: sizes differ by at most one; `"chunk"`: those of `torch.chunk`, as in
            `torch.nn.DataParallel`; `"adaptive"`: learnt from the times of calls in training;
            `"cost"`: by what the module's method `sample_cost(arguments)` says; or a function
            `(batch_size, devices) -> sizes`. Not `"auto"`: no Trainer ends steps here.
        weights: fixed shares, one number per device; None for equal ones.
        buffers: which buffers stay after a call in training: those of the `"first"` replica, or
            the `"mean"` of all.
        executor: `"threads"`, `"inorder"`, or `"auto"` for the faster of both.
        gather_overrides: how outputs under certain keys are gathered, see `gather`. Without one,
            0-dim outputs are stacked to shape [K].
        check_first_call: whether the first call, and the first one in training, is run on a few
            samples on the first device alone, too, to compare outputs, what it leaves on the
            module, and in training the gradients of a random sum of its outputs. Everything is put
            back. A difference beyond rounding is a warning that names the cause. `"auto"` leaves
            modules with compiled parts or more than 4 GiB of parameters out.

    Attributes:
        first_call: what that check has found in the latest call that it looked at.
        last_sizes: samples per device in the latest call; () before the first.
        module: the module; its parameters are the ones to optimise.
        device_ids: the indices of the devices (of CPU devices, None).
        devices: the devices.
        src_device_obj: the first of them, where the module lies.
        output_device: where outputs end up.
        dim: the dimension.

    Raises:
        TypeError: `module` is no module.
        ValueError: there is no such device, or an option is out of its range.

    Example:
        >>> import torch
        >>> net = DataParallel(nn.Linear(3, 2), device_ids=["cpu", "cpu"])
        >>> net(torch.randn(5, 3)).shape, net.last_sizes, list(net.state_dict())
        (torch.Size([5, 2]), (3, 2), ['weight', 'bias'])
        >>> net.close()
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        split: str | OwnSplit = "even",
        *,
        weights: Sequence[float] | None = None,
        buffers: Buffers = "first",
        executor: ExecutorName = "auto",
        gather_overrides: Mapping[str, Override] | None = None,
        check_first_call: bool | Literal["auto"] = "auto",
    ) -> None:
        check_module(module)
        check_split(split, weights, is_timed=False)
        check_choice("check_first_call", check_first_call, ("auto", True, False))
        check_engine_options(dim, buffers, executor, gather_overrides)
        super().__init__()
        self.module = module
        ids = all_devices() if device_ids is None else device_ids
        self.devices = resolve_devices(ids, "device_ids")
        self.device_ids = [device.index for device in self.devices]
        self.src_device_obj = self.devices[0]
        self.output_device = resolve_output_device(minus_one_is_cpu(output_device), self.devices)
        self.dim = dim
        self.last_sizes: tuple[int, ...] = ()
        self._options: dict[str, Any] = {
            "output_device": self.output_device,
            "dim": dim,
            "is_call_arguments": True,
            "buffers": buffers,
            "executor": executor,
            "overrides": gather_overrides,
        }
        self._split, self._weights = split, weights
        self._policy()  # raises for a wrong number of weights
        self._check_first_call: bool | Literal["auto"] = check_first_call
        self._reports: list[Report] = []
        self._engine: ForwardParallel | None = None
        self._identity = id(self)
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]  # torch's

    @property
    def first_call(self) -> Report | None:
        """What `check_first_call` has found; None before the first call."""
        return self._reports[-1] if self._reports else None

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What `module(*inputs, **kwargs)` returns, computed on all devices."""
        if self._identity != id(self):  # a wrapper around this one has replicated it
            return self.module(*inputs, **kwargs)
        self._move_module()
        if any(
            name in vars(self) or getattr(type(self), name) is not getattr(DataParallel, name)
            for name in STAGES
        ):
            return self._forward_by_stages(inputs, kwargs)
        if len(self.devices) == 1:
            args, options = to_device((inputs, kwargs), self.devices[0])
            return to_device(self.module(*args, **options), self.output_device)
        if self._engine is None:
            self._engine = self._make_engine()
        with self._engine.turn, self._engine.spreading():
            output = self.module(*inputs, **kwargs)
            self.last_sizes = self._engine.last_sizes
            return output

    def _make_engine(self) -> ForwardParallel:
        make = partial(_engine, self.module, self.devices, self._options)
        engine = make(self._policy())
        if self._check_first_call:
            is_asked = self._check_first_call is True
            engine.first_calls = FirstCalls(
                partial(make, executor="inorder"),
                "check_first_call",
                always=is_asked,
                report=partial(_announce, self._reports, is_asked),
            )
        return engine

    def _policy(self) -> SplitPolicy:
        capacities = partial(memory_capacities, self.devices)
        return split_policy(self._split, self._weights, self.devices, capacities)

    # The stages, for subclasses. Arguments come in two sequences, positional and named ones, with
    # an entry per device. Of devices without samples those at the end have no entry, the others
    # have None.

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[DeviceLike | None]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Cuts the arguments of a call; evenly, if they are not for all devices."""
        devices, kwargs = _resolved(device_ids), kwargs or {}
        arguments = {**dict(enumerate(inputs)), **kwargs}
        inferred = infer_for(self.module, arguments, self.dim, is_call_arguments=True)
        if inferred.size:
            is_even = devices != self.devices
            policy = split_policy("even", None, devices) if is_even else self._policy()
            least = partial(fewest_samples, self.module)
            plan = Planner(len(devices), policy).plan(
                inferred.size, list, training=self.training, least=least
            )
            self.last_sizes = plan.sizes
            parts = cut_for(self.module, arguments, inferred, plan.sizes, self.dim)
        else:
            self.last_sizes, parts = (1,), [arguments]
        while parts[-1] is None:
            parts.pop()
        args: list[Any] = []
        named: list[Any] = []
        for part, device in zip(parts, devices, strict=False):
            moved = None if part is None else to_device(part, device)
            args.append(None if moved is None else tuple(moved[i] for i in range(len(inputs))))
            named.append(None if moved is None else {name: moved[name] for name in kwargs})
        return tuple(args), tuple(named)

    def replicate(self, module: Any, device_ids: Sequence[DeviceLike | None]) -> list[Any]:
        """A module on these devices; without gradients its replicas are detached."""
        return replicate(module, _resolved(device_ids), detach=not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        """The outputs of the replicas; None of those whose arguments are None."""
        return parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """Joins the outputs, see `lightning_dp.gather`; 0-dim ones are stacked."""
        sizes = self.last_sizes[: len(outputs)]
        is_known = len(sizes) == len(outputs) and sum(sizes) == sum(self.last_sizes)
        return gather(
            outputs,
            output_device,
            self.dim,
            sizes=sizes if is_known else None,
            scalars="stack",
            overrides=self._options["overrides"],
        )

    def _forward_by_stages(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._split in ("adaptive", "cost") or self._options["buffers"] != "first":
            raise ValueError(
                f"{type(self).__qualname__}: expected a split by numbers and buffers='first', as "
                f"it replaces stages of DataParallel, got split={self._split!r} and "
                f"buffers={self._options['buffers']!r}. Leave these options out."
            )
        self.last_sizes = ()  # `scatter` sets it, unless the subclass's cuts in its own way
        args, named = self.scatter(inputs, kwargs, self.device_ids)
        if not args and not named:
            args, named = ((),), ({},)
        if len(self.device_ids) == 1:
            return to_device(self.module(*args[0], **named[0]), self.output_device)
        replicas = self.replicate(self.module, self.device_ids[: len(args)])
        return self.gather(self.parallel_apply(replicas, args, named), self.output_device)

    # Its life and its state

    def close(self) -> None:
        """Ends the worker threads; a later call starts new ones."""
        if self._engine is not None:
            self._engine.close()

    def __del__(self) -> None:
        """As `close`. A finalizer would hold the engine, and with it what holds this wrapper."""
        engine, identity = map(self.__dict__.get, ("_engine", "_identity"))
        if engine and identity == id(self) and not sys.is_finalizing():  # a replica has it, too
            self.close()

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """The module's own state, without the prefix `module.`."""
        return self.module.state_dict(*args, prefix=prefix, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads into the module, from keys with prefixes of wrappers or without them."""
        renamed = normalize_state_dict(state_dict, self.module, strict=False)
        return self.module.load_state_dict(renamed, strict, assign)

    def __getstate__(self) -> dict[str, Any]:
        """Threads stay behind: a copy makes its own when it is first called."""
        return {**self.__dict__, "_engine": None, "_reports": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a wrapper of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self._identity = id(self)

    def _move_module(self) -> None:
        root = self.devices[0]
        tensors = chain(self.module.parameters(), self.module.buffers())
        elsewhere = next((t.device for t in tensors if t.device != root), None)
        if elsewhere is not None:
            warnings.warn(
                f"DataParallel: expected the module on {root}, its first device, got a part of "
                f"it on {elsewhere}: moved to {root}. Call module.to({str(root)!r}) yourself.",
                stacklevel=4,
            )
            self.module.to(root)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Calls a module once on several devices, as `DataParallel` does.

    For more than one call make a `DataParallel`, which keeps its replicas.

    Args:
        module: the module.
        inputs: its arguments as a tuple, or a single argument of another type; None for none.
        device_ids: the devices, root first; None for all accelerators of the machine, or the CPU.
        output_device: where outputs end up; None for the first device, -1 for the CPU.
        dim: the dimension along which arguments are cut and outputs joined.
        module_kwargs: its named arguments.

    Example:
        >>> data_parallel(nn.Linear(3, 2), torch.randn(5, 3), ["cpu", "cpu"]).shape
        torch.Size([5, 2])
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    wrapper = DataParallel(module, device_ids, output_device, dim, check_first_call=False)
    try:
        return wrapper(*inputs, **module_kwargs or {})
    finally:
        wrapper.close()


def check_engine_options(
    dim: object, buffers: object, executor: object, overrides: Mapping[str, Override] | None
) -> None:
    """Raises a ValueError for the first option that is out of its range."""
    check_dim(dim)
    check_choice("buffers", buffers, BUFFERS)
    check_choice("executor", executor, EXECUTORS)
    check_overrides(overrides, "gather_overrides")


# Functions, since bound methods would keep the wrapper alive as long as its engine.


def _engine(
    module: nn.Module,
    devices: Sequence[torch.device],
    options: dict[str, Any],
    split: SplitPolicy,
    **others: Any,
) -> ForwardParallel:
    return ForwardParallel(module, devices, split=split, **{**options, **others})


def _announce(reports: list[Report], asked: bool, report: Report) -> None:
    reports.append(report)
    announce(report, asked=asked, stacklevel=3)


def _resolved(device_ids: Sequence[DeviceLike | None]) -> list[torch.device]:
    """The devices of ids as `device_ids` has them, where CPU devices are None."""
    return resolve_devices(["cpu" if d is None else d for d in device_ids], "device_ids")


def _add_prefix(
    wrapper: DataParallel[Any], state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Lets a bigger module load its state into the wrapper, whichever prefixes keys have."""
    keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    names = match_keys(keys, list(wrapper.module.state_dict()))
    values = {f"{prefix}module.{names[key]}": state_dict.pop(prefix + key) for key in keys}
    state_dict.update(values)
