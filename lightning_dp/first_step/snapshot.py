"""Saves everything that a call may change on a module, to compare it and to put it back."""

from __future__ import annotations

import argparse
import inspect
import io
import pickle
import random
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dp.parallel.reduce import StashedGradients, SuspendedHooks, clear_gradients
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.torch_private import (
    FIXED_NAMES,
    buffer_table,
    child_table,
    hook_tables,
    hooked,
    parameter_table,
)

_LIBRARIES = {
    *("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_dp"),
    *("aim", "clearml", "comet_ml", "mlflow", "neptune", "tensorboard", "tensorboardX", "wandb"),
    *sys.stdlib_module_names,
}
"""Packages whose objects are not entered: no Trainer, lock, thread, file or logger."""
_ENTERED = (SimpleNamespace, argparse.Namespace, UserDict, LRScheduler)
"""Their objects are, though."""
_ATOMS = (str, bytes, int, float, complex, type(None), type, FunctionType, torch.dtype)
_CONTAINERS = (dict, list, deque, set)


class NotChecked(Exception):
    """Raised, with the reason, where a call cannot be compared or its changes not put back."""


class _Found(NamedTuple):
    """An object that is reached from the module, from where, and whether it is compared."""

    node: Any
    path: str
    is_compared: bool


class ModuleSnapshot:
    """The state of a module, of all objects that it refers to, and of random generators.

    One walk from the module finds parameters, buffers, other tensors and arrays, containers,
    modules, generators and the user's plain objects. It copies values to the CPU, and remembers
    which objects containers and objects hold. Changes of files, environment variables, classes,
    global numbers and objects of libraries are not seen.

    Until `end`, gradients are None and hooks of parameters do not fire.

    Args:
        module: the module.
        devices: the devices whose random state is kept.
        others: containers, optimizers and schedulers outside of the module that a call may change.

    Attributes:
        parameters: all leaf tensors that are, or may be, trained.

    Raises:
        NotChecked: on an iterator, open file or uninitialized parameter, which nothing can set
            back.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Iterable[torch.device],
        others: Iterable[Any] = (),
    ) -> None:
        self.module = module
        self._roots = [_Found(module, "self", True), *(_Found(o, "", False) for o in others)]
        self._known: list[Any] = []  # all objects: an id is unique among living ones only
        self._before: dict[int, Any] = {}  # values, items and attributes, by the id of their owner
        self._restores: list[Callable[[], object]] = []
        accelerators = {device for device in devices if device.type != "cpu"}
        self._generators = [
            *filter(None, map(_generator, (random, np.random, torch.default_generator))),
            *map(_generator_of_device, accelerators),
        ]
        for node, path, _ in self._walk():
            self._known.append(node)
            self._keep(node, path)
        self._keep_containers_of_functions()
        self._restores += [partial(g.set, g.get()) for g in self._generators]
        tensors = [node for node in self._known if isinstance(node, Tensor) and node.is_leaf]
        self.parameters = [t for t in tensors if t.requires_grad or isinstance(t, nn.Parameter)]
        self._hooks = [SuspendedHooks(self.parameters[i]) for i in hooked(self.parameters)]
        self._gradients = StashedGradients(self.parameters)

    def changes(self) -> dict[tuple[str, str], Any]:
        """What differs from the snapshot now, by kind and place, as detached copies on the CPU.

        Attributes that a step sets on modules are left out: the value of replica 0 is kept by rule.
        """
        names = {id(p): ("parameter", name) for name, p in self.module.named_parameters()}
        names |= {id(b): ("buffer", name) for name, b in self.module.named_buffers()}
        changed: dict[tuple[str, str], Any] = {}
        for node, path, is_compared in self._walk():
            before = self._before.get(id(node))
            kind, name = names.get(id(node), ("state", path))
            if not is_compared:
                continue
            if before is None:  # a new object, seen where it is held
                if kind == "buffer":
                    changed[kind, name] = copy_to_cpu(node)
            elif isinstance(node, Tensor | np.ndarray):
                if not _is_equal(node, before):
                    changed[kind, name] = copy_to_cpu(node)
            elif isinstance(node, _CONTAINERS):
                now = _of_no_device(node)
                if _ids(now) != _ids(_of_no_device(before)):
                    ordered = sorted(now, key=repr) if isinstance(now, set) else list(now)
                    changed["list", path] = copy_to_cpu(now if isinstance(now, dict) else ordered)
            elif _is_entered(node):
                for key, value in vars(node).items():
                    if not isinstance(value, _CONTAINERS) and value is not before.get(key, self):
                        changed["state", f"{path}.{key}"] = copy_to_cpu(value)
        return changed

    def restore(self) -> None:
        """Puts everything back, but for gradients, which are None."""
        with ExitStack() as stack:  # an error in one does not keep the others from running
            stack.callback(clear_gradients, self.parameters)
            for restore in self._restores:
                stack.callback(restore)

    def end(self) -> None:
        """Puts everything back, gradients and hooks of parameters too."""
        with ExitStack() as stack:
            for hooks in self._hooks:
                stack.callback(hooks.put_back)
            stack.callback(self._gradients.put_back)
            stack.callback(self.restore)

    def reseed(self, seed: int) -> None:
        """Seeds all these generators."""
        for generator in self._generators:
            generator.seed(seed)

    def python_state(self) -> bytes:
        """Where the generators of Python and NumPy stand."""
        return pickle.dumps([g.get() for g in self._generators if not g.is_torch])

    def perturb(self, eps: float, seed: int) -> None:
        """Moves each parameter by a relative `eps` up or down, to see what rounding can make."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters:
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.data.mul_(1 + eps * signs.to(parameter))

    def _walk(self) -> Iterator[_Found]:
        """All objects that are reached now, each once, holders before what they hold."""
        waiting, seen = self._roots[::-1], set()
        while waiting:
            node, path, is_compared = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            is_compared = is_compared and not isinstance(node, Optimizer | LRScheduler)
            yield _Found(node, path, is_compared)
            held = [_Found(value, path + step, is_compared) for step, value in _held_by(node)]
            waiting += held[::-1]

    # How each kind of object is kept

    def _keep(self, node: Any, path: str) -> None:
        if isinstance(node, Tensor):
            self._keep_tensor(node, path)
        elif _is_array(node):
            before = self._before[id(node)] = node.copy()
            self._restores.append(partial(np.copyto, node, before))
        elif isinstance(node, _CONTAINERS):
            self._keep_items(node, node)
        elif (generator := _generator(node)) is not None:
            self._generators.append(generator)
        elif isinstance(node, Iterator | io.IOBase):
            raise NotChecked(f"it may move {path} on, which cannot be set back.")
        elif isinstance(node, nn.Module) or _is_entered(node):
            self._keep_items(vars(node), node)
            for name, table in vars(node).items() if isinstance(node, nn.Module) else ():
                if name in FIXED_NAMES and isinstance(table, dict):  # of parameters, hooks, ...
                    self._keep_items(table, table)

    def _keep_tensor(self, tensor: Tensor, path: str) -> None:
        """Keeps its values and where they are in memory."""
        if is_lazy(tensor):
            raise NotChecked(f"it would initialize {path}, which cannot be set back.")
        if tensor.grad_fn is not None:
            raise NotChecked(f"{path} has a graph, whose leaves may lie outside of the module.")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            return
        memory, needs_grad = tensor.detach(), tensor.requires_grad
        values = self._before[id(tensor)] = memory.to("cpu", copy=True)

        def restore() -> None:
            if _address(tensor) != _address(memory):
                tensor.data = memory.data
            if not _is_equal(memory, values):
                memory.data.copy_(values)  # through `data`: no version counter moves
            if tensor.is_leaf and tensor.requires_grad != needs_grad:
                tensor.requires_grad_(needs_grad)

        self._restores.append(restore)

    def _keep_items(self, items: Any, owner: Any) -> None:
        """Keeps which objects are in a container, not what is in them."""
        is_dict, is_set = isinstance(items, dict), isinstance(items, set)
        before: Any = dict(items) if is_dict else set(items) if is_set else list(items)
        self._before[id(owner)] = before

        def restore() -> None:
            if _ids(items) == _ids(before):
                return
            items.clear()
            if is_dict:
                for key, value in before.items():  # `update` of a Counter would count
                    items[key] = value
            else:
                items.update(before) if is_set else items.extend(before)

        self._restores.append(restore)

    def _keep_containers_of_functions(self) -> None:
        """Keeps the items of containers that steps and hooks refer to outside of the module.

        Such as a list of a notebook to which a step appends. What is in them is not entered: it may
        be a data set.
        """
        modules = [node for node in self._known if isinstance(node, nn.Module)]
        classes = {cls for module in modules for cls in type(module).__mro__}
        tables: list[Any] = [vars(cls) for cls in classes if not _is_library(cls)]
        tables += [table for module in modules for table in hook_tables(module)]
        for function in [value for table in tables for value in table.values()]:
            with suppress(TypeError, ValueError):  # no function, or one with an empty cell
                outside = inspect.getclosurevars(function)
                for value in (*outside.nonlocals.values(), *outside.globals.values()):
                    if isinstance(value, _CONTAINERS) and id(value) not in self._before:
                        self._known.append(value)
                        self._keep_items(value, value)


def copy_to_cpu(node: Any) -> Any:
    """A copy of a tree with its tensors detached, on the CPU."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, node
    )


# What an object refers to


def _held_by(node: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, each with how Python reaches it from there."""
    attributes: dict[str, Any] = {}
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, nn.Module):
        others = {name: value for name, value in vars(node).items() if name not in FIXED_NAMES}
        attributes = {**parameter_table(node), **buffer_table(node), **child_table(node), **others}
    elif isinstance(node, Optimizer):  # its state changes only where it steps
        attributes = {"param_groups": node.param_groups}
    elif isinstance(node, dict):
        items = node.items()
    elif isinstance(node, (*_CONTAINERS, tuple, frozenset)):
        items = enumerate(node)
    elif _is_entered(node):
        attributes = vars(node)
    yield from ((f".{k}", v) for k, v in attributes.items() if not isinstance(v, _ATOMS))
    yield from ((f"[{k!r}]", v) for k, v in items if not isinstance(v, _ATOMS))


def _is_entered(node: Any) -> bool:
    """Whether an object's attributes may be a step's."""
    if isinstance(node, Tensor | nn.Module | Optimizer):
        return False
    has_attributes = isinstance(getattr(node, "__dict__", None), dict)
    return has_attributes and (isinstance(node, _ENTERED) or not _is_library(type(node)))


def _is_library(cls: type) -> bool:
    return cls.__module__.split(".")[0] in _LIBRARIES


def _is_array(node: Any) -> bool:
    return isinstance(node, np.ndarray) and node.flags.writeable and node.dtype != object


def _ids(items: Any) -> Any:
    """Which objects are in a container."""
    if isinstance(items, dict):
        return [(id(key), id(value)) for key, value in items.items()]
    return set(map(id, items)) if isinstance(items, set) else list(map(id, items))


def _of_no_device(items: Any) -> Any:
    """Without the entries that a dict keeps for each device."""
    if not isinstance(items, dict):
        return items
    keys = {key: key if isinstance(key, tuple) else (key,) for key in items}
    kept = [k for k, parts in keys.items() if not any(isinstance(p, torch.device) for p in parts)]
    return {key: items[key] for key in kept}


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_equal(now: Any, before: Any) -> bool:
    """Bit by bit, so that a NaN equals itself."""
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    if isinstance(now, np.ndarray):
        return np.array_equal(now, before)
    now = now.detach().cpu()
    return torch.equal(now, before) or torch.allclose(now, before, 0.0, 0.0, equal_nan=True)


# Random generators


class _Generator(NamedTuple):
    """How a random generator is read, set back and seeded, and whether it is one of torch."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    seed: Callable[[int], object]
    is_torch: bool = False


def _generator(node: Any) -> _Generator | None:
    """Of an object that is a generator, or of the modules `random` and `numpy.random`."""
    if isinstance(node, torch.Generator):
        return _Generator(node.get_state, node.set_state, node.manual_seed, True)
    if node is random or isinstance(node, random.Random):
        return _Generator(node.getstate, node.setstate, node.seed)
    if node is np.random or isinstance(node, np.random.RandomState):
        return _Generator(node.get_state, node.set_state, node.seed)
    if isinstance(node, np.random.Generator):
        bits: Any = node.bit_generator
        write = partial(setattr, bits, "state")
        return _Generator(lambda: bits.state, write, lambda seed: write(type(bits)(seed).state))
    return None


def _generator_of_device(device: torch.device) -> _Generator:
    module: Any = torch.get_device_module(device)
    at = () if device.type == "mps" else (device,)  # of mps there is only one

    def write(state: Tensor) -> None:
        module.set_rng_state(state, *at)

    def seed(number: int) -> None:
        write(torch.Generator(device).manual_seed(number).get_state())

    return _Generator(partial(module.get_rng_state, *at), write, seed, True)
