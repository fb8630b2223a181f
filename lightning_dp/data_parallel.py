"""`DataParallel`: what `torch.nn.DataParallel` is used for, on the engine of forward mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from torch import nn

from lightning_dp.checkpointing.state_keys import match_keys, normalize_state_dict
from lightning_dp.first_step import FirstCalls, Report, announce
from lightning_dp.parallel.apply import EXECUTORS, ExecutorName
from lightning_dp.parallel.checks import check_choice, check_dim
from lightning_dp.parallel.devices import (
    DeviceLike,
    all_devices,
    memory_capacities,
    minus_one_is_cpu,
    resolve_devices,
    resolve_output_device,
)
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.functional import check_is_on
from lightning_dp.parallel.gather import Override, check_overrides
from lightning_dp.parallel.reduce import BUFFERS, Buffers
from lightning_dp.parallel.scatter import to_device
from lightning_dp.parallel.split import OwnSplit, SplitPolicy, check_split, split_policy
from lightning_dp.parallel.torch_private import not_compiled

Module = TypeVar("Module", bound=nn.Module)

STAGES = ("scatter", "replicate", "parallel_apply", "gather")


class DataParallel(nn.Module, Generic[Module]):
    """Spreads the calls of a module over several devices, for plain PyTorch.

    A drop-in for `torch.nn.DataParallel`: arguments are cut along `dim`, every device calls
    `forward` of its replica, and the outputs are joined on the output device; a backward fills
    the gradients of `module`. The differences: replicas are built once and kept; nothing is cut
    or dropped silently; dtypes of autocast and inference mode reach the replicas; parameters that
    a call did not use keep the gradient None; hooks of `module` itself see whole batches; it works
    on the CPU; and `state_dict()` has no prefix `module.`.

    A subclass that replaces stages of `torch.nn.DataParallel` (`scatter`, `replicate`,
    `parallel_apply`, `gather`) is refused: its `forward` calls the functions of these names.

    Args:
        module: the module, on the first device.
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
        last_sizes: samples per device in the latest call; () before the first.
        module, device_ids, src_device_obj, output_device, dim: as in `torch.nn.DataParallel`.
        devices: the devices.

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
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DataParallel: expected a torch.nn.Module, got {type(module).__qualname__}. "
                "Wrap the module that computes the outputs."
            )
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
        self._split, self._weights = split, weights
        self._policy()  # raises for a wrong number of weights
        own = {"buffers": buffers, "executor": executor, "overrides": gather_overrides}
        self._options: dict[str, Any] = own
        self._check_first_call: bool | Literal["auto"] = check_first_call
        self._engine: ForwardParallel | None = None
        self._identity = id(self)
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]  # torch's
        if len(self.devices) == 1:
            module.to(self.src_device_obj)

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What `module(*inputs, **kwargs)` returns, computed on all devices."""
        if self._identity != id(self):  # a wrapper around this one has replicated it
            return self.module(*inputs, **kwargs)
        check_is_on(self.module, self.src_device_obj)
        own = [name for name in STAGES if name in vars(self) or hasattr(type(self), name)]
        if own:
            raise TypeError(
                f"{type(self).__qualname__}: expected no stages of its own, got {own}, which the "
                "engine would not call. Override forward, and call lightning_dp.scatter, "
                "replicate, parallel_apply and gather there."
            )
        if len(self.devices) == 1:
            inputs, kwargs = to_device((inputs, kwargs), self.src_device_obj)
            return to_device(self.module(*inputs, **kwargs), self.output_device)
        if self._engine is None:
            self._engine = self._make_engine()
        with self._engine.turn, self._engine.spreading():
            output = self.module(*inputs, **kwargs)
            self.last_sizes = self._engine.last_sizes
            return output

    @property
    def first_call(self) -> Report | None:
        """What `check_first_call` has found in the latest call that it looked at."""
        calls: FirstCalls | None = None if self._engine is None else self._engine.first_calls
        return None if calls is None else calls.latest

    def _make_engine(self) -> ForwardParallel:
        # Nothing here refers to the wrapper: its threads end when it is garbage collected.
        make = partial(
            ForwardParallel,
            self.module,
            self.devices,
            output_device=self.output_device,
            dim=self.dim,
            split=self._policy(),
            is_call_arguments=True,
            **self._options,
        )
        engine = make()
        if self._check_first_call:
            asked = self._check_first_call is True
            engine.first_calls = FirstCalls(
                partial(make, executor="inorder"),
                "check_first_call",
                always=asked,
                found=partial(announce, asked=asked),
            )
        return engine

    def _policy(self) -> SplitPolicy:
        capacities = partial(memory_capacities, self.devices)
        return split_policy(self._split, self._weights, self.devices, capacities)

    # Its life and its state

    def close(self) -> None:
        """Ends the worker threads; a later call starts new ones."""
        if self._engine is not None:
            self._engine.close()

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
        return {**self.__dict__, "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a wrapper of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self._identity = id(self)


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
    keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    names = match_keys(keys, list(wrapper.module.state_dict()))
    values = {f"{prefix}module.{names[key]}": state_dict.pop(prefix + key) for key in keys}
    state_dict.update(values)
