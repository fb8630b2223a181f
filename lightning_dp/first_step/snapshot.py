"""What a module was before: everything that running it may change, to be put back."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.parallel.gradients import GradientsAside, HooksOff, clear_gradients
from lightning_dp.parallel.torch_private import hooked

Restore = Callable[[], Any]

_FRAMEWORKS = {"torch", "lightning", "lightning_fabric", "pytorch_lightning"}
_TRACKERS = {"aim", "clearml", "comet_ml", "mlflow", "neptune", "wandb"}
_BOARDS = {"tensorboard", "tensorboardX"}
_BASES = {"abc", "collections", "dataclasses", "typing", "typing_extensions"}
_LEFT_ALONE = (set(sys.stdlib_module_names) - _BASES) | _FRAMEWORKS | _TRACKERS | _BOARDS
"""Packages whose objects are not looked into, unless they are modules or containers."""


class Snapshot:
    """A module at one moment, with all that hangs on it, and the random numbers to come.

    That is the values of parameters, buffers and other tensors and arrays, gradients, the items of
    lists, dicts, sets and deques, the attributes of modules and of the user's own objects, wherever
    they are found from the module on; and the states of Python's, NumPy's and torch's random
    generators, of all devices named and of those that hang on the module.

    Values are kept on the CPU: it takes no memory of the devices. Until `end` gradients are None,
    and hooks of parameters off. Others are containers that a step reaches past the module.
    """

    def __init__(
        self, module: nn.Module, devices: Iterable[torch.device], others: Iterable[Any] = ()
    ) -> None:
        self._generators = _process_generators(devices)
        self._own_generators: list[Any] = []
        self._objects = self._walk([module, *others])
        self._parameters = trained_tensors(module)
        self._hooks = [HooksOff(self._parameters[i]) for i in hooked(self._parameters)]
        for hooks in self._hooks:
            hooks.take()
        self._gradients = GradientsAside(self._parameters)

    def restore(self) -> None:
        """Puts everything back; gradients are None."""
        for restore in (*self._objects, *self._generators):
            restore()
        clear_gradients(self._parameters)

    def end(self) -> None:
        """Puts everything back, gradients and hooks of parameters too."""
        self.restore()
        self._gradients.put_back()
        for hooks in self._hooks:
            hooks.put_back()

    def reseed(self, seed: int) -> None:
        """Lets all these generators give other numbers, until the next `restore`."""
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        for generator in self._own_generators:
            _reseed(generator, seed)

    def _walk(self, roots: list[Any]) -> list[Restore]:
        restores: list[Restore] = []
        seen: dict[int, Any] = {}  # the objects too: an id is unique among living ones
        waiting: list[Any] = list(roots)
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen[id(node)] = node
            restore, children = _look_at(node)
            waiting.extend(children)
            if restore is not None:
                restores.append(restore)
            if restore is not None and _is_generator(node):
                self._own_generators.append(node)
        return restores


def trained_tensors(module: nn.Module) -> list[Tensor]:
    """The parameters of a module, and those of its buffers on which gradients accumulate."""
    leaves = [buffer for buffer in module.buffers() if buffer.is_leaf and buffer.requires_grad]
    unique: dict[int, Tensor] = {id(tensor): tensor for tensor in (*module.parameters(), *leaves)}
    return list(unique.values())


def _look_at(node: Any) -> tuple[Restore | None, Iterable[Any]]:
    """How to put an object back, and what hangs on it."""
    if isinstance(node, Tensor):
        return _tensor(node), ()
    if isinstance(node, torch.Generator):
        return partial(node.set_state, node.get_state()), ()
    if isinstance(node, random.Random):
        return partial(node.setstate, node.getstate()), ()
    # A container of a class of its own may have attributes.
    attributes = [vars(node)] if hasattr(node, "__dict__") else []
    if isinstance(node, dict):
        return _dict(node), [*node.values(), *attributes]
    if isinstance(node, list | deque | set):
        return _items(node), [*node, *attributes]
    if isinstance(node, tuple | frozenset):
        return None, node
    if isinstance(node, nn.Module) or _is_users(node):
        return None, attributes
    return _of_numpy(node), ()


def _is_users(node: Any) -> bool:
    """Whether an object may have state of the user's own: no class, function, Trainer or lock."""
    if isinstance(node, SimpleNamespace):
        return True
    packages = {cls.__module__.split(".")[0] for cls in type(node).__mro__[:-1]}
    return hasattr(node, "__dict__") and not isinstance(node, type) and not packages & _LEFT_ALONE


def _tensor(tensor: Tensor) -> Restore | None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return None
    memory, needs_grad = tensor.detach(), tensor.requires_grad
    values = memory.to("cpu", copy=True)

    def restore() -> None:
        if _place(tensor) != _place(memory):
            tensor.data = memory.data
        if not torch.equal(memory.cpu(), values):
            memory.data.copy_(values)  # without a trace in the version, too
        if tensor.is_leaf and tensor.requires_grad != needs_grad:
            tensor.requires_grad_(needs_grad)

    return restore


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _dict(node: dict[Any, Any]) -> Restore:
    before = list(node.items())

    def restore() -> None:
        now = [part for item in node.items() for part in item]
        if list(map(id, now)) != [id(part) for item in before for part in item]:
            node.clear()
            for key, value in before:
                node[key] = value

    return restore


def _items(node: Any) -> Restore:
    before = list(node)

    def restore() -> None:
        if list(map(id, node)) != list(map(id, before)):
            node.clear()
            node.update(before) if isinstance(node, set) else node.extend(before)

    return restore


def _of_numpy(node: Any) -> Restore | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(node, numpy.ndarray) and node.flags.writeable:
        before = node.copy()
        return lambda: numpy.copyto(node, before)
    if isinstance(node, numpy.random.Generator):
        bits = node.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(node, numpy.random.RandomState):
        return partial(node.set_state, node.get_state())
    return None


def _is_generator(node: Any) -> bool:
    return any(hasattr(node, name) for name in ("manual_seed", "seed", "bit_generator"))


def _reseed(generator: Any, seed: int) -> None:
    """Of torch, Python or NumPy."""
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        getattr(generator, "manual_seed", generator.seed)(seed)


def _process_generators(devices: Iterable[torch.device]) -> list[Restore]:
    restores: list[Restore] = [
        partial(random.setstate, random.getstate()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if "numpy" in sys.modules:
        generators = sys.modules["numpy"].random
        restores.append(partial(generators.set_state, generators.get_state()))
    for device in {device for device in devices if device.type != "cpu"}:
        module = torch.get_device_module(device)
        name = () if device.type == "mps" else (device,)  # there it is the only one
        restores.append(partial(module.set_rng_state, module.get_rng_state(*name), *name))
    return restores
