"""`replicate` and `parallel_apply` for plain PyTorch; with `scatter` and `gather`, all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.apply import Executor, Task
from lightning_dp.parallel.devices import DeviceLike, resolve_devices
from lightning_dp.parallel.gather import gather as gather
from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import scatter as scatter
from lightning_dp.parallel.torch_private import buffer_table


def replicate(
    module: nn.Module, devices: Sequence[DeviceLike], detach: bool = False
) -> list[nn.Module]:
    """A module on every device, for one forward and backward.

    The first replica is the module itself. The others compute with its parameters' values, on
    the first device in their very memory; gradients that go through them reach the module's own
    parameters. A later change of the module may not reach them: replicate again, or use
    `DataParallel`, which keeps its replicas and copies only what changed.

    Args:
        module: the module; its parameters lie on `devices[0]`.
        devices: the devices, `devices[0]` first; an entry may repeat.
        detach: whether no gradient is to go through them. Then no replica is the module itself;
            on the first device parameters and buffers are still the module's memory.

    Returns:
        One module per device.

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
    resolved = resolve_devices(devices)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != resolved[0]:
            raise ValueError(
                f"Expected the module on {resolved[0]}, the first device, got {name!r} on "
                f"{tensor.device}. Call module.to({str(resolved[0])!r}) first."
            )
    if detach:
        return _detached(module, resolved)
    replicas = Replicas(module, resolved)
    replicas.connect(range(len(resolved)), after_backward=lambda: None)
    return replicas.modules


def _detached(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    replicas = Replicas(module, [devices[0], *devices])
    for parameter in chain.from_iterable(replicas.parameters[1:]):
        parameter.requires_grad_(False)
    root, first = replicas.submodules[:2]
    for original, twin in zip(root, first, strict=True):
        buffer_table(twin).update(buffer_table(original))
    return replicas.modules[1:]


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Calls all replicas at the same time, each in a thread of its own.

    The threads have the caller's state: grad and inference mode, autocast, default device, modes
    and context variables.

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
    keywords = [None] * len(replicas) if kwargs is None else list(kwargs)
    if not len(replicas) == len(inputs) == len(keywords):
        raise ValueError(
            f"Expected as many inputs and kwargs as replicas, got {len(replicas)} replicas, "
            f"{len(inputs)} inputs and {len(keywords)} kwargs. Give None to idle replicas."
        )
    places = list(map(_device_of, replicas)) if devices is None else resolve_devices(devices)
    if len(places) != len(replicas):
        raise ValueError(
            f"Expected as many devices as replicas, got {len(places)} and {len(replicas)}. Name "
            "each replica's device, or leave them out."
        )
    tasks = []
    for k, (replica, positional, named) in enumerate(zip(replicas, inputs, keywords, strict=True)):
        if positional is not None:
            args = positional if isinstance(positional, tuple) else (positional,)
            call = partial(replica, *args, **(named or {}))
            tasks.append(Task(k, places[k], call, lambda: ", forward"))
    outputs: list[Any] = [None] * len(replicas)
    executor = Executor(places or [torch.device("cpu")], "threads")
    try:
        for task, output in zip(tasks, executor.run("forward", tasks), strict=True):
            outputs[task.replica] = output
    finally:
        executor.close()
    return outputs


def _device_of(module: nn.Module) -> torch.device:
    tensors = chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
