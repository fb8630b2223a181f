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

from lightning_dp.parallel.apply import EXECUTORS, ExecutorName
from lightning_dp.parallel.check import FirstCalls, Report, announce
from lightning_dp.parallel.checks import check_choice, check_dim, check_module
from lightning_dp.parallel.contexts import replaced
from lightning_dp.parallel.devices import (
    DeviceLike,
    all_devices,
    memory_capacities,
    minus_one_is_cpu,
    resolve_devices,
    resolve_output_device,
)
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.functional import gather
from lightning_dp.parallel.gather import Override, check_overrides
from lightning_dp.parallel.reduce import BUFFERS, Buffers
from lightning_dp.parallel.scatter import to_device
from lightning_dp.parallel.split import OwnSplit, Sizes, SplitPolicy, check_split, split_policy
from lightning_dp.parallel.stages import Stages, replaces_stages
from lightning_dp.parallel.state_keys import match_keys, normalize_state_dict
from lightning_dp.parallel.torch_private import not_compiled

Module = TypeVar("Module", bound=nn.Module)


class DataParallel(nn.Module, Generic[Module]):
    """Spreads the calls of a module over several devices, for plain PyTorch.

    A drop-in for `torch.nn.DataParallel`: arguments are cut along `dim`, every device calls
    `forward` of its replica, and the outputs are joined on the output device; a backward fills
    the gradients of `module`. What is different: replicas are built once and kept; nothing is cut
    or dropped silently; dtypes of autocast and inference mode reach the replicas; parameters that
    a call did not use keep the gradient None; hooks of `module` itself see whole batches; it works
    on the CPU; and `state_dict()` has no prefix `module.`.

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
        self._options: dict[str, Any] = {
            "output_device": self.output_device,
            "dim": dim,
            "columns": True,
            "buffers": buffers,
            "executor": executor,
            "overrides": gather_overrides,
        }
        # A wrong number of weights raises here. A copy's engine has a policy of its own.
        self._split = (split, weights, self.devices, partial(memory_capacities, self.devices))
        split_policy(*self._split)
        self._check_first_call: bool | Literal["auto"] = check_first_call
        self._reports: list[Report] = []
        self._engine: ForwardParallel | None = None
        self._sizes: Sizes = ()  # of the shards whose outputs are gathered
        self._identity = id(self)
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]  # torch's

    @property
    def first_call(self) -> Report | None:
        """What `check_first_call` has found; None before the first call."""
        return self._reports[-1] if self._reports else None

    @property
    def last_sizes(self) -> tuple[int, ...]:
        """Samples per device in the latest call; () before the first."""
        return self._engine.last_sizes if self._engine is not None else ()

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What `module(*inputs, **kwargs)` returns, computed on all devices."""
        if self._identity != id(self):  # a wrapper around this one has replicated it
            return self.module(*inputs, **kwargs)
        self._move_module()
        if replaces_stages(self, DataParallel):
            return self._by_stages(inputs, kwargs)
        if len(self.devices) == 1:
            args, options = to_device((inputs, kwargs), self.devices[0])
            return to_device(self.module(*args, **options), self.output_device)
        engine = self._spreader()
        with engine.turn(), engine.spreading():
            return self.module(*inputs, **kwargs)

    # The stages, for subclasses

    def scatter(
        self, inputs: Any, kwargs: Any, device_ids: Sequence[DeviceLike | None]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Cuts the arguments of a call: the positional ones of each device, and the named ones.

        At the end devices without samples are left out, elsewhere they have None.
        """
        return self._stages().scatter(inputs, kwargs or {}, self._places(device_ids))

    def replicate(self, module: Any, device_ids: Sequence[DeviceLike | None]) -> list[Any]:
        """A module on these devices."""
        return self._stages().replicate(module, self._places(device_ids))

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        """The outputs of the replicas; None of those whose arguments are None."""
        return self._stages().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """Joins the outputs, see `lightning_dp.gather`; 0-dim ones are stacked."""
        sizes = self._sizes if len(self._sizes) == len(outputs) else None
        overrides = self._options["overrides"]
        return gather(
            outputs, output_device, self.dim, sizes=sizes, scalars="stack", overrides=overrides
        )

    def _by_stages(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, named = self.scatter(inputs, kwargs, self.device_ids)
        if not args and not named:
            args, named = ((),), ({},)
        if len(self.device_ids) == 1:
            return to_device(self.module(*args[0], **named[0]), self.output_device)
        replicas = self.replicate(self.module, self.device_ids[: len(args)])
        outputs = self.parallel_apply(replicas, args, named)
        with replaced(self, _sizes=self._stages().sizes(args, named)):
            return self.gather(outputs, self.output_device)

    def _places(self, device_ids: Sequence[DeviceLike | None]) -> list[torch.device]:
        """The devices of ids as `device_ids` has them, where CPU devices are None."""
        return resolve_devices(["cpu" if d is None else d for d in device_ids], "device_ids")

    def _stages(self) -> Stages:
        return Stages(self._spreader(), self.dim)

    def _spreader(self) -> ForwardParallel:
        if self._engine is None:
            make = partial(_engine, self.module, self.devices, self._options)
            self._engine = make(split_policy(*self._split))
            if self._check_first_call:
                self._engine.first_calls = FirstCalls(
                    partial(make, executor="inorder"),
                    "check_first_call",
                    always=self._check_first_call is True,
                    report=partial(_announce, self._reports, self._check_first_call is True),
                )
        return self._engine

    def close(self) -> None:
        """Ends the worker threads; a later call starts new ones."""
        if self._engine is not None:
            self._engine.close()

    def __del__(self) -> None:
        """As `close`. A finalizer would hold the engine, and with it what holds this wrapper."""
        own = self.__dict__  # a replica of this has the engine of the original
        if own.get("_engine") and own["_identity"] == id(self) and not sys.is_finalizing():
            self.close()

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """The module's own state, without the prefix `module.`."""
        return self.module.state_dict(*args, prefix=prefix, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads into the module, from keys with prefixes of wrappers or without them."""
        own = normalize_state_dict(state_dict, self.module, strict=False)
        return self.module.load_state_dict(own, strict, assign)

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


def _engine(
    module: nn.Module,
    devices: Sequence[torch.device],
    options: dict[str, Any],
    split: SplitPolicy,
    **others: Any,
) -> ForwardParallel:
    own = {**options, **others}
    return ForwardParallel(module, devices, split=split, **own)


def _announce(reports: list[Report], asked: bool, report: Report) -> None:
    reports.append(report)
    announce(report, asked=asked, stacklevel=3)


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


def _add_prefix(
    wrapper: DataParallel[Any], state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Lets a bigger module load its state into the wrapper, whichever prefixes keys have."""
    own = [f"module.{key}" for key in wrapper.module.state_dict()]
    keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    names = {key: name for key, name in match_keys(keys, own).items() if key != name}
    values = [state_dict.pop(prefix + key) for key in names]
    state_dict.update(zip([prefix + name for name in names.values()], values, strict=True))
