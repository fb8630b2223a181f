"""Saves everything that a call may change on a module, to compare it and to put it back."""

from __future__ import annotations

import argparse
import inspect
import io
import random
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
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
"""Packages into whose objects the walk does not go: a Trainer, lock, thread, file or logger."""
_ENTERED = (nn.Module, LRScheduler, SimpleNamespace, argparse.Namespace)
"""Classes of these packages into whose objects it goes all the same."""
_ATOMS = (str, bytes, int, float, complex, type(None), type, torch.dtype)
_CONTAINERS = (dict, list, deque, set)
_MOVES_ON = (Iterator, io.IOBase, random.Random, np.random.Generator, np.random.RandomState)


class NotChecked(Exception):
    """Raised, with the reason, where a call cannot be compared or its changes not put back."""


class Snapshot:
    """The state of a module, of all objects that it refers to, and of random generators.

    One walk from the module, and from `others` such as optimizers, finds tensors and arrays, whose
    values are copied to the CPU, and containers and objects, of which it notes what they hold.
    Lists and dicts that a hook of the module appends to are found through the hook's function.
    Files and objects of libraries are not saved.

    Until `end`, gradients are None and hooks of parameters do not fire.

    Raises:
        NotChecked: on an iterator, an open file, a generator of Python or NumPy, an uninitialized
            parameter or a tensor with a graph.
    """

    def __init__(
        self, module: nn.Module, devices: Iterable[torch.device], others: Mapping[str, Any]
    ) -> None:
        named = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
        self._names = {id(t): (kind, name) for kind, of in named.items() for name, t in of}
        for path, metric in module.named_modules():
            for state, value in getattr(metric, "metric_state", {}).items():
                self._names[id(value)] = "metric", f"self.{path}.{state}"
        self._kept: list[tuple[str, Any, Any, Tensor | None]] = []  # path, and see `_restore`
        self._generators, leaves = [torch.default_generator], list[Tensor]()
        for path, node in _walk({"self": module, **others}):
            has_graph = isinstance(node, Tensor) and (node.grad_fn is not None or is_lazy(node))
            if isinstance(node, _MOVES_ON) or has_graph:
                raise NotChecked(f"{path} is a {type(node).__qualname__}: it cannot be put back.")
            if isinstance(node, Tensor) and node.is_leaf:
                leaves.append(node)
            if isinstance(node, torch.Generator):
                self._generators.append(node)
            elif (memory := _memory(node)) is not None:
                self._kept.append((path, node, memory.to("cpu", copy=True), memory))
            elif (items := _items(node)) is not None:
                before = dict(dict.items(items)) if isinstance(items, dict) else list(items)
                self._kept.append((path, node, before, None))
        # Of these devices alone: the others may be another program's.
        self._accelerators = [
            (torch.get_device_module(d), d) for d in {*devices} if d.type != "cpu"
        ]
        self._random: list[tuple[Any, ...]] = [  # functions with their arguments
            (random.setstate, random.getstate()),
            (np.random.set_state, np.random.get_state()),
            *((generator.set_state, generator.get_state()) for generator in self._generators),
            *((of.set_rng_state, of.get_rng_state(on), on) for of, on in self._accelerators),
        ]
        self._requires_grad = [(t, t.requires_grad) for t in leaves]
        self._parameters = [t for t in leaves if t.requires_grad or isinstance(t, nn.Parameter)]
        self._hooks = SuspendedHooks(self._parameters)
        self._gradients = StashedGradients(self._parameters)

    def bound(self) -> list[Any]:
        """What the attributes of all modules are now."""
        modules = [node for _, node, *_ in self._kept if isinstance(node, nn.Module)]
        return [value for module in modules for value in vars(module).values()]

    def changes(self, named: Iterable[Any] = ()) -> dict[tuple[str, str], Any]:
        """What differs now, by kind and place, as detached copies on the CPU.

        Args:
            named: values of module attributes to leave out.
        """
        apart = set(map(id, named))
        changed: dict[tuple[str, str], Any] = {}
        for path, node, before, memory in self._kept:
            kind = _kind(path, node)
            if memory is not None:
                now = _memory(node)
                if now is not None and not _is_equal(now, before):
                    changed[self._names.get(id(node), (kind, path))] = copy_to_cpu(now)
            elif isinstance(before, list):
                if _ids(node) != _ids(before):
                    ordered = sorted(node, key=repr) if isinstance(node, set) else list(node)
                    changed[kind, path] = copy_to_cpu(ordered)
            elif kind:
                is_dict, is_module = isinstance(node, dict), isinstance(node, nn.Module)
                states = getattr(node, "metric_state", ()) if is_module else ()
                for key, value in dict.items(_items(node)):
                    # Of a library's module only new attributes count, which users' hooks bind.
                    is_its_own = is_module and key in before and not _is_own(node)
                    if key not in states and (is_its_own or (is_module and id(value) in apart)):
                        continue
                    is_other = value is not before.get(key, self) and not _names_device(key)
                    if is_other and (is_dict or not isinstance(value, _CONTAINERS)):
                        name = _named(path + (f"[{key!r}]" if is_dict else f".{key}"))
                        name = name.removeprefix("self.") if kind == "buffer" else name
                        changed["metric" if key in states else kind, name] = copy_to_cpu(value)
        return changed

    def restore(self) -> None:
        """Puts everything back, but for gradients, which are None."""
        with ExitStack() as stack:  # an error in one does not keep the others from running
            stack.callback(clear_gradients, self._parameters)
            for _, *kept in self._kept:
                stack.callback(_restore, *kept)
            for function, *args in self._random:
                stack.callback(function, *args)
            for tensor, requires_grad in self._requires_grad:
                if tensor.is_leaf and tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)

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
        for of, device in self._accelerators:
            of.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)

    def perturb(self, eps: float, seed: int) -> None:
        """Moves each parameter by a relative `eps` up or down, to see what rounding can make."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._parameters:
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.data.mul_(1 + eps * signs.to(parameter))


def copy_to_cpu(node: Any) -> Any:
    """A copy of a tree with its tensors detached, on the CPU."""
    cpu = torch.device("cpu")
    return tree.map_leaves(
        lambda x: x.detach().to(cpu, copy=True) if isinstance(x, Tensor) else tree.move(x, cpu),
        node,
    )


# One object


def _items(node: Any) -> Any:
    """The container in which an object keeps what it holds, live; None if it has no such."""
    if isinstance(node, _CONTAINERS):
        return node
    return vars(node) if _has_attributes(node) else None


def _restore(node: Any, before: Any, memory: Tensor | None) -> None:
    """Gives a tensor or an array its values, in its memory, or a container what it held."""
    if memory is not None:
        if isinstance(node, Tensor) and _address(node) != _address(memory):
            node.data = memory
        if not _is_equal(memory, before):
            memory.data.copy_(before)  # through `data`: no version counter moves
        return
    items = _items(node)
    if _ids(items) == _ids(before):
        return
    items.clear()
    if isinstance(items, dict):
        for key, value in before.items():  # `update` of a Counter would count
            items[key] = value
    else:
        items.update(before) if isinstance(items, set) else items.extend(before)


def _kind(path: str, node: Any) -> str:
    """Of which kind a change of what an object holds is; "" if nothing depends on it."""
    name = path.rpartition(".")[2]
    if name in FIXED_NAMES:
        return "buffer" if name == "_buffers" else ""
    if isinstance(node, nn.Module) or name == "__dict__":  # a parameter's
        return "attribute"
    return "list" if isinstance(node, _CONTAINERS) and path.startswith("self") else "state"


def _named(path: str) -> str:
    """A path as the user writes it: `self.name` for an entry in a table of a module."""
    return re.sub(r"\.(?:_parameters|_buffers|_modules|__dict__)\['(\w*)'\]", r".\1", path)


# What an object refers to


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All objects that are reached now, each once, with their paths; holders come first.

    Containers that a function names are not entered: all of a notebook's data may be in them.
    """
    waiting, seen = [(name, root, True) for name, root in roots.items()][::-1], set()
    while waiting:
        path, node, is_entered = waiting.pop()
        if id(node) not in seen and not isinstance(node, _ATOMS):
            seen.add(id(node))
            yield _named(path), node
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
    if isinstance(node, FunctionType):  # the plain containers in its closure, or in its module
        with suppress(ValueError):  # a variable of the closure has no value yet
            names = inspect.getclosurevars(node)
            known = {**names.globals, **names.nonlocals}
            return [(f".{name}", v) for name, v in known.items() if type(v) in _CONTAINERS]
    return [(f".{k}", v) for k, v in vars(node).items()] if _has_attributes(node) else []


def _has_attributes(node: Any) -> bool:
    """Whether an object has attributes that a step may bind."""
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


def _names_device(key: Any) -> bool:
    """Whether a dict keeps an entry for each device, as caches do."""
    return any(isinstance(part, torch.device) for part in (key if type(key) is tuple else (key,)))


def _memory(node: Any) -> Tensor | None:
    """A tensor with the memory of a tensor or an array; None if it has no plain one."""
    if isinstance(node, Tensor):
        is_plain = node.layout is torch.strided and not node.is_meta and not node.is_nested
        return node.detach() if is_plain else None
    is_array = isinstance(node, np.ndarray) and node.flags.writeable and node.dtype.kind in "biufc"
    return torch.from_numpy(node) if is_array else None


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_equal(now: Tensor, before: Tensor) -> bool:
    """Bit by bit, so that a NaN equals itself."""
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    now = now.cpu()
    return torch.equal(now, before) or torch.allclose(now, before, 0.0, 0.0, equal_nan=True)
