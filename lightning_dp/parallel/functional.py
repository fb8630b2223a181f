"""`replicate` and `parallel_apply` for plain PyTorch; with `scatter` and `gather`, all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.apply import Executor, Task
from lightning_dp.parallel.devices import CPU, DeviceLike, resolve_devices
from lightning_dp.parallel.gather import gather as gather
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import scatter as scatter


def check_is_on(module: nn.Module, device: torch.device) -> None:
    """Raises a ValueError unless all of the module lies on a device."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != device:
            raise ValueError(
                f"Expected the module on {device}, the first device, got {name!r} on "
                f"{tensor.device}. Call module.to({str(device)!r}) first."
            )


def replicate(module: nn.Module, devices: Sequence[DeviceLike]) -> list[nn.Module]:
    """A module on every device, for one forward and backward.

    The first replica is the module itself. The others compute with its parameters' values, on
    the first device in their very memory; gradients that go through them reach the module's own
    parameters. A later change of the module may not reach them: replicate again, or use
    `DataParallel`, which keeps its replicas and copies only what changed.

    Args:
        module: the module; its parameters lie on `devices[0]`.
        devices: the devices, `devices[0]` first; an entry may repeat.

    Raises:
        ValueError: there is no such device, the module lies elsewhere, or a submodule cannot be
            replicated.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> first, second = replicate(net, ["cpu", "cpu"])
        >>> first is net, second is net
        (True, False)
        >>> second(torch.ones(3, 2)).sum().backward()
        >>> net.weight.grad
        tensor([[3., 3.]])
    """
    places = resolve_devices(devices)
    check_is_on(module, places[0])
    replicas = Replicas(module, places)
    replicas.connect(range(len(places)), after_backward=lambda: None)
    return replicas.modules


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Calls all replicas at the same time, each in a thread of its own.

    The threads have the caller's state: grad and inference mode, autocast, default device and
    context variables.

    Args:
        replicas: one module per device.
        inputs: for each replica its positional arguments as a tuple, or a single argument of
            another type; None for a replica that has no samples and is not called.
        kwargs: for each replica its keyword arguments, or None; None for no keywords at all.
        devices: for each replica the device that is to be current; None for those of their
            parameters.

    Returns:
        One output per replica, None where it was not called.

    Raises:
        ValueError: the sequences have different lengths.
        Exception: a replica's own, with a note that says which replica.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> outputs = parallel_apply([net, net], [torch.ones(3, 2), None])
        >>> outputs[0].shape, outputs[1]
        (torch.Size([3, 1]), None)
    """
    named = [None] * len(replicas) if kwargs is None else list(kwargs)
    places = list(map(_device_of, replicas)) if devices is None else resolve_devices(devices)
    if not len(replicas) == len(inputs) == len(named) == len(places):
        raise ValueError(
            f"Expected one input, kwargs and device per replica, got {len(replicas)} replicas, "
            f"{len(inputs)} inputs, {len(named)} kwargs and {len(places)} devices. Give None to "
            "idle replicas."
        )
    tasks = []
    for k, (replica, given) in enumerate(zip(replicas, inputs, strict=True)):
        if given is not None:
            args = given if isinstance(given, tuple) else (given,)
            call = partial(replica, *args, **(named[k] or {}))
            tasks.append(Task(k, places[k], call, lambda: ", forward"))
    outputs: list[Any] = [None] * len(replicas)
    executor = Executor(places or [CPU], "threads")
    try:
        for task, output in zip(tasks, executor.run("forward", tasks), strict=True):
            outputs[task.replica] = output
    finally:
        executor.close()
    return outputs


def _device_of(module: nn.Module) -> torch.device:
    tensors = chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), CPU)
