"""Saves everything that a call may change on a module, to compare it and to put it back."""

from __future__ import annotations

import argparse
import inspect
import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dp.parallel.reduce import StashedGradients, SuspendedHooks, clear_gradients
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.torch_private import FIXED_NAMES

_LIBRARIES = {
    *("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_dp"),
    *("aim", "clearml", "comet_ml", "mlflow", "neptune", "tensorboard", "tensorboardX", "wandb"),
    *sys.stdlib_module_names,
}
"""Packages whose objects are not entered: no Trainer, lock, thread, file or logger."""
_ENTERED = (nn.Module, LRScheduler, SimpleNamespace, argparse.Namespace)
"""Their objects are, though."""
_ATOMS = (str, bytes, int, float, complex, type(None), type, torch.dtype)
_CONTAINERS = (dict, list, deque, set)
_MOVES_ON = Iterator, io.IOBase, random.Random, np.random.Generator, np.random.RandomState


class NotChecked(Exception):
    """Raised, with the reason, where a call cannot be compared or its changes not put back."""


class ModuleSnapshot:
    """The state of a module, of all objects that it refers to, and of random generators.

    One walk from the module, and from `others` such as optimizers, finds tensors and arrays, whose
    values are copied to the CPU, and containers and objects, of which is kept what they hold. So
    are lists and dicts that a hook appends to, though they are outside of the module. What else is
    there (files, objects of libraries) is not seen.

    Until `end`, gradients are None and hooks of parameters do not fire.

    Raises:
        NotChecked: on an iterator, an open file, a generator of Python or NumPy, an uninitialized
            parameter or a tensor with a graph.
    """

    def __init__(
        self, module: nn.Module, devices: Iterable[torch.device], others: Iterable[Any] = ()
    ) -> None:
        self.module = module
        self._known: list[Any] = []  # all objects: an id is unique among living ones only
        self._before: dict[int, Any] = {}  # values, items and attributes, by the id of their owner
        self._restores: list[Callable[[], object]] = [
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
        ]
        self._generators = [torch.default_generator]
        self._accelerators = [device for device in {*devices} if device.type != "cpu"]
        for path, node in _walk(module, *others):
            self._known.append(node)
            self._keep(path, node)
        for generator in self._generators:
            self._restores.append(partial(generator.set_state, generator.get_state()))
        for device in self._accelerators:
            kind: Any = torch.get_device_module(device)
            self._restores.append(partial(kind.set_rng_state, kind.get_rng_state(device), device))
        tensors = [node for node in self._known if isinstance(node, Tensor) and node.is_leaf]
        self._parameters = [t for t in tensors if t.requires_grad or isinstance(t, nn.Parameter)]
        self._hooks = SuspendedHooks(self._parameters)
        self._gradients = StashedGradients(self._parameters)

    def changes(self, *, attributes: bool = False) -> dict[tuple[str, str], Any]:
        """What differs on the module now, by kind and place, as detached copies on the CPU.

        Args:
            attributes: those that were bound on modules, too. A Trainer's mode names them itself.
        """
        names = {id(p): ("parameter", name) for name, p in self.module.named_parameters()}
        names |= {id(b): ("buffer", name) for name, b in self.module.named_buffers()}
        changed: dict[tuple[str, str], Any] = {}
        for path, node in _walk(self.module):
            before = self._before.get(id(node))
            kind, name = names.get(id(node), ("state", path))
            if before is None:  # a new object, seen where it is held
                if kind == "buffer":
                    changed[kind, name] = copy_to_cpu(node)
            elif isinstance(node, Tensor | np.ndarray):
                if not _is_equal(_memory(node), before):
                    changed[kind, name] = copy_to_cpu(node)
            elif path.endswith(".__dict__"):  # a parameter's
                for key, value in node.items():
                    if value is not before.get(key, self):
                        changed["attribute", path.replace("__dict__", key)] = copy_to_cpu(value)
            elif isinstance(node, _CONTAINERS):
                now = _of_no_device(node)
                if _ids(now) != _ids(_of_no_device(before)):
                    ordered = sorted(now, key=repr) if isinstance(now, set) else list(now)
                    changed["list", path] = copy_to_cpu(now if isinstance(now, dict) else ordered)
            elif not isinstance(node, nn.Module) or (attributes and _is_own(node)):
                kind = "attribute" if isinstance(node, nn.Module) else "state"
                for key, value in vars(node).items():
                    if not isinstance(value, _CONTAINERS) and value is not before.get(key, self):
                        changed[kind, f"{path}.{key}"] = copy_to_cpu(value)
        return changed

    def restore(self) -> None:
        """Puts everything back, but for gradients, which are None."""
        with ExitStack() as stack:  # an error in one does not keep the others from running
            stack.callback(clear_gradients, self._parameters)
            for restore in self._restores:
                stack.callback(restore)

    def end(self) -> None:
        """Puts everything back, gradients and hooks of parameters too."""
        with ExitStack() as stack:
            stack.callback(self._hooks.put_back)
            stack.callback(self._gradients.put_back)
            stack.callback(self.restore)

    def reseed(self, seed: int) -> None:
        """Seeds the random generators."""
        random.seed(seed)
        np.random.seed(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        for device in self._accelerators:  # and no device that is another program's
            state = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(state, device)

    def perturb(self, eps: float, seed: int) -> None:
        """Moves each parameter by a relative `eps` up or down, to see what rounding can make."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._parameters:
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.data.mul_(1 + eps * signs.to(parameter))

    def _keep(self, path: str, node: Any) -> None:
        is_fixed = not isinstance(node, Tensor) or (node.grad_fn is None and not is_lazy(node))
        if isinstance(node, _MOVES_ON) or not is_fixed:
            raise NotChecked(f"nothing sets {path} back, a {type(node).__qualname__}.")
        if (memory := _memory(node)) is not None:
            self._keep_values(node, memory)
        elif isinstance(node, torch.Generator):
            self._generators.append(node)
        elif isinstance(node, _CONTAINERS):
            self._keep_items(node, node)
        elif _is_entered(node):
            self._keep_items(node, vars(node))
            for table in _tables(node):
                self._keep_items(table, table)

    def _keep_values(self, node: Any, memory: Tensor) -> None:
        """Keeps the values of a tensor or an array, and where a tensor's are in memory."""
        values = self._before[id(node)] = memory.to("cpu", copy=True)
        needs_grad = isinstance(node, Tensor) and node.requires_grad

        def restore() -> None:
            if isinstance(node, Tensor) and _address(node) != _address(memory):
                node.data = memory.data
            if not _is_equal(memory, values):
                memory.data.copy_(values)  # through `data`: no version counter moves
            if isinstance(node, Tensor) and node.is_leaf and node.requires_grad != needs_grad:
                node.requires_grad_(needs_grad)

        self._restores.append(restore)

    def _keep_items(self, owner: Any, items: Any) -> None:
        """Keeps which objects are in a container, not what is in them."""
        before: Any = dict(dict.items(items)) if isinstance(items, dict) else list(items)
        self._before[id(owner)] = before

        def restore() -> None:
            if _ids(items) == _ids(before):
                return
            items.clear()
            if isinstance(items, dict):
                for key, value in before.items():  # `update` of a Counter would count
                    items[key] = value
            else:
                items.update(before) if isinstance(items, set) else items.extend(before)

        self._restores.append(restore)


def copy_to_cpu(node: Any) -> Any:
    """A copy of a tree with its tensors detached, on the CPU."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, node
    )


# What an object refers to


def _walk(*roots: Any) -> Iterator[tuple[str, Any]]:
    """All objects that are reached now, each once, with their paths; holders come first.

    Containers that a function names are not entered: all of a notebook's data may be in them.
    """
    waiting, seen = [("self", root, True) for root in reversed(roots)], set()
    while waiting:
        path, node, is_entered = waiting.pop()
        if id(node) not in seen and not isinstance(node, _ATOMS):
            seen.add(id(node))
            yield path, node
            enters = not isinstance(node, FunctionType)
            held = _held_by(node) if is_entered else []
            waiting += [(path + step, value, enters) for step, value in held][::-1]


def _held_by(node: Any) -> list[tuple[str, Any]]:
    """The objects that an object holds, each with how Python reaches it from there."""
    if isinstance(node, dict):
        return [(f"[{key!r}]", value) for key, value in dict.items(node)]
    if isinstance(node, (*_CONTAINERS, tuple, frozenset)):
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    if isinstance(node, Optimizer):  # its state changes only where it steps
        return [(".param_groups", node.param_groups)]
    if isinstance(node, nn.Parameter):  # per-sample gradients, as libraries keep them there
        return [(".__dict__", vars(node))]
    if isinstance(node, FunctionType):
        return _known_to(node)
    if not _is_entered(node):
        return []
    tables = _tables(node)  # parameters, buffers and modules are attributes, hooks are functions
    own = [item for item in vars(node).items() if not any(item[1] is table for table in tables)]
    items = chain(own, *(t.items() for t in tables))
    return [(f".{key}" if isinstance(key, str) else ".<hook>", value) for key, value in items]


def _known_to(function: FunctionType) -> list[tuple[str, Any]]:
    """The plain containers that a function names: in its closure, or in its module."""
    with suppress(ValueError):  # a variable of the closure has no value yet
        names = inspect.getclosurevars(function)
        known = {**names.globals, **names.nonlocals}
        return [(f".{name}", v) for name, v in known.items() if type(v) in _CONTAINERS]
    return []


def _tables(node: Any) -> list[dict[Any, Any]]:
    """The dicts of a module's parameters, buffers, modules and hooks."""
    items = vars(node).items() if isinstance(node, nn.Module) else ()
    return [value for name, value in items if name in FIXED_NAMES and isinstance(value, dict)]


def _is_entered(node: Any) -> bool:
    """Whether an object's attributes may be a step's."""
    if isinstance(node, Tensor | Optimizer) or not isinstance(getattr(node, "__dict__", 0), dict):
        return False
    return isinstance(node, _ENTERED) or _is_own(node)


def _is_own(node: Any) -> bool:
    """Whether its class is the user's."""
    return type(node).__module__.split(".")[0] not in _LIBRARIES


def _ids(items: Any) -> list[int]:
    """Which objects are in a container."""
    # Of dict itself: an OrderedDict's subclass may make new values in its __getitem__.
    return list(map(id, chain(items, dict.values(items)) if isinstance(items, dict) else items))


def _of_no_device(items: Any) -> Any:
    """Without the entries that a dict keeps for each device."""
    if not isinstance(items, dict):
        return items
    parts = {key: key if isinstance(key, tuple) else (key,) for key in items}
    return {k: items[k] for k in items if not any(isinstance(p, torch.device) for p in parts[k])}


def _memory(node: Any) -> Tensor | None:
    """A tensor with the memory of a tensor or an array; None if it has no plain one."""
    if isinstance(node, Tensor):
        is_plain = node.layout is torch.strided and not node.is_meta and not node.is_nested
        return node.detach() if is_plain else None
    is_array = isinstance(node, np.ndarray) and node.flags.writeable and node.dtype.kind in "biufc"
    return torch.from_numpy(node) if is_array else None


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_equal(now: Tensor | None, before: Tensor) -> bool:
    """Bit by bit, so that a NaN equals itself."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    now = now.cpu()
    return torch.equal(now, before) or torch.allclose(now, before, 0.0, 0.0, equal_nan=True)
