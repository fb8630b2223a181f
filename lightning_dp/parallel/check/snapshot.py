"""A module as it was at one moment: what a call may change on it, to be compared and put back."""

from __future__ import annotations

import argparse
import io
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

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
    *("torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_dp"),
    *("aim", "clearml", "comet_ml", "mlflow", "neptune", "tensorboard", "tensorboardX", "wandb"),
}
"""Packages whose objects are not entered; those of a user's subclass are."""
_PLAIN_BASES = {"abc", "collections", "dataclasses", "typing", "typing_extensions", "enum"}
_STANDARD = set(sys.stdlib_module_names) - _PLAIN_BASES
"""Packages whose subclasses' objects are not entered either: threads, locks, files."""

_ATOMS = (str, bytes, int, float, complex, type(None), type, FunctionType, torch.dtype)
_CONTAINERS = (dict, list, deque, set)


class NotChecked(Exception):
    """Raised, with the reason, where a call cannot be compared or its changes not put back."""


class _Found(NamedTuple):
    """An object that is reached from the module, from where, and whether it is compared."""

    node: Any
    path: str
    compared: bool


class Snapshot:
    """A module at one moment, with all that hangs on it, and the state of random generators.

    One walk from the module finds parameters, buffers, other tensors and arrays, containers,
    modules, generators and the user's plain objects, and records each by its kind: values in host
    memory, items and attributes as references. It does not see what a call does to a file, an
    environment, a class, a global number, or to objects of libraries.

    Until `end`, gradients are None and hooks of parameters do not fire.

    Args:
        module: the module.
        devices: the devices whose random state is kept.
        others: containers, optimizers and schedulers outside of the module that a call may change.
        compared_elsewhere: whether the caller itself compares the state of a module inside, which
            is only restored then.

    Raises:
        NotChecked: on an iterator, open file or uninitialized parameter, which nothing can set
            back.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Iterable[torch.device],
        others: Iterable[Any] = (),
        compared_elsewhere: Callable[[nn.Module], bool] = lambda module: False,
    ) -> None:
        self.module = module
        self._roots = [_Found(module, "self", True), *(_Found(o, "", False) for o in others)]
        self._compared_elsewhere = compared_elsewhere
        self._known: dict[int, Any] = {}  # all objects: an id is unique among living ones only
        self._copies: dict[int, Any] = {}  # of tensors and arrays, by id
        self._parts: dict[tuple[str, str], Any] = {}  # items of containers, and attributes
        self._generators = list(_process_generators({d for d in devices if d.type != "cpu"}))
        self._restores: list[Callable[[], Any]] = []
        self._graphs: list[Any] = []
        for found in self._walk():
            self._known[id(found.node)] = found.node
            self._keep(found)
        self._keep_containers_of_functions()
        self._restores += [partial(g.set, g.get()) for g in self._generators]
        tensors = [node for node in self._known.values() if isinstance(node, Tensor)]
        leaves = [
            t for t in tensors if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))
        ]
        leaves += _leaves_of(self._graphs)
        self.parameters = list({id(tensor): tensor for tensor in leaves}.values())
        self._hooks = [SuspendedHooks(self.parameters[i]) for i in hooked(self.parameters)]
        self._gradients = StashedGradients(self.parameters)

    @property
    def has_graph(self) -> bool:
        """Whether a tensor on the module has a graph, which the real call needs, too."""
        return bool(self._graphs)

    def changes(self) -> dict[tuple[str, str], Any]:
        """What differs from the snapshot now, by kind and place, as detached host copies.

        Kinds are "parameter", "buffer", "list" (any container's items) and "state" (attributes and
        tensors of plain objects). Other attributes that a step binds on modules are not among
        them: the first replica's value stays by rule.
        """
        names = {id(p): ("parameter", name) for name, p in self.module.named_parameters()}
        names |= {id(b): ("buffer", name) for name, b in self.module.named_buffers()}
        changed: dict[tuple[str, str], Any] = {}
        for node, path, compared in self._walk():
            if not compared:
                continue
            if isinstance(node, Tensor):
                kind, name = names.get(id(node), ("state", path))
                is_new_buffer = kind == "buffer" and id(node) not in self._known
                if is_new_buffer or not _equal(node, self._copies.get(id(node), node)):
                    changed[kind, name] = on_host(node)
            elif id(node) in self._copies:  # an array
                before = self._copies[id(node)]
                if node.dtype != object and not sys.modules["numpy"].array_equal(node, before):
                    changed["state", path] = node.copy()
            for place, part in _parts_of(node, path):
                unknown = part if place[0] == "list" else self  # no new containers
                if not _is_same(part, self._parts.get(place, unknown)):
                    changed[place] = on_host(part)
        return changed

    def restore(self) -> None:
        """Puts everything back; gradients are None."""
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

    def reseed(self, seed: int, python_seed: int | None = None) -> None:
        """Seeds all these generators; those of Python and NumPy differently if asked."""
        for generator in self._generators:
            is_other = python_seed is not None and not generator.is_torch
            generator.seed(python_seed if is_other else seed)

    def python_state(self) -> bytes:
        """Where the generators of Python and NumPy stand."""
        return pickle.dumps([g.get() for g in self._generators if not g.is_torch])

    def perturb(self, eps: float, seed: int) -> None:
        """Moves each parameter by a relative `eps` up or down, to see what rounding can make."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters:
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                signs = torch.randint(0, 2, (parameter.numel(),), generator=generator) * 2 - 1
                factors = 1 + eps * signs.to(torch.float64).view(parameter.shape)
                parameter.data.copy_(parameter.detach().cpu().double() * factors)

    def _walk(self) -> Iterator[_Found]:
        """All objects that are reached now, each once, holders before what they hold."""
        waiting, seen = self._roots[::-1], set()
        while waiting:
            node, path, compared = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, nn.Module):
                compared = compared and not self._compared_elsewhere(node)
            compared = compared and not isinstance(node, Optimizer | LRScheduler)
            yield _Found(node, path, compared)
            held = [_Found(v, path + step, compared) for step, v in _held_by(node)]
            waiting.extend(held[::-1])

    def _keep(self, found: _Found) -> None:
        """Records one object by its kind."""
        node, path, compared = found
        if isinstance(node, Tensor):
            self._keep_tensor(node, path)
        elif isinstance(node, nn.Module):
            self._keep_items(vars(node))
            for name, table in vars(node).items():
                if name in FIXED_NAMES and isinstance(table, dict):
                    self._keep_items(table)
        elif isinstance(node, _CONTAINERS):
            self._keep_items(node)
        elif (generator := _generator(node)) is not None:
            self._generators.append(generator)
        elif isinstance(node, Iterator | io.IOBase):
            raise NotChecked(f"it may move {path} on, which cannot be set back.")
        elif _is_array(node):
            before = self._copies[id(node)] = node.copy()
            self._restores.append(partial(sys.modules["numpy"].copyto, node, before))
        if _is_entered(node):
            self._keep_items(vars(node))
        if compared:
            self._parts.update(_parts_of(node, path))

    def _keep_tensor(self, tensor: Tensor, path: str) -> None:
        """Keeps its values and where they are in memory."""
        if is_lazy(tensor):
            raise NotChecked(f"it would initialize {path}, which cannot be set back.")
        if tensor.grad_fn is not None:
            self._graphs.append(tensor.grad_fn)
        if not _has_values(tensor):
            return
        memory, needs_grad = tensor.detach(), tensor.requires_grad
        values = self._copies[id(tensor)] = memory.to("cpu", copy=True)

        def restore() -> None:
            if _address(tensor) != _address(memory):
                tensor.data = memory.data
            if not _equal(memory, values):
                memory.data.copy_(values)  # through `data`: no version counter moves
            if tensor.is_leaf and tensor.requires_grad != needs_grad:
                tensor.requires_grad_(needs_grad)

        self._restores.append(restore)

    def _keep_items(self, node: Any) -> None:
        """Keeps which objects are in a container, not what is in them."""
        before = list(node.items() if isinstance(node, dict) else node)

        def restore() -> None:
            now = list(node.items() if isinstance(node, dict) else node)
            if isinstance(node, dict):
                if [(id(k), id(v)) for k, v in now] != [(id(k), id(v)) for k, v in before]:
                    node.clear()
                    for key, value in before:  # `update` of a Counter would count
                        node[key] = value
            elif list(map(id, now)) != list(map(id, before)):
                node.clear()
                node.update(before) if isinstance(node, set) else node.extend(before)

        self._restores.append(restore)

    def _keep_containers_of_functions(self) -> None:
        """Keeps the items of containers that steps and hooks refer to outside of the module.

        Such as a list of a notebook to which a step appends. What is in them is not entered: it may
        be a data set.
        """
        modules = [node for node in self._known.values() if isinstance(node, nn.Module)]
        for function in {f: None for module in modules for f in _functions_of(module)}:
            outside = [function.__globals__.get(name) for name in function.__code__.co_names]
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    outside.append(cell.cell_contents)
            for value in outside:
                if isinstance(value, _CONTAINERS) and id(value) not in self._known:
                    self._known[id(value)] = value
                    self._keep_items(value)


def on_host(node: Any) -> Any:
    """A copy of a tree with its tensors detached, in host memory."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, node
    )


# What hangs on an object


def _held_by(node: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, each with how Python reaches it from there."""
    named: list[Any] = []
    if isinstance(node, nn.Module):
        named += [parameter_table(node), buffer_table(node), child_table(node)]
        named.append({k: v for k, v in vars(node).items() if k not in FIXED_NAMES})
    elif isinstance(node, Optimizer):  # its state changes only where it steps
        named.append({"param_groups": node.param_groups})
    elif _is_entered(node):
        named.append(vars(node))
    for table in named:
        yield from ((f".{k}", v) for k, v in table.items() if not isinstance(v, _ATOMS))
    pairs: Any = ()
    if isinstance(node, dict):
        pairs = node.items()
    elif isinstance(node, (*_CONTAINERS, tuple, frozenset)):
        pairs = enumerate(node)
    yield from ((f"[{k!r}]", v) for k, v in pairs if not isinstance(v, _ATOMS))


def _leaves_of(graphs: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors on which a backward through these graphs accumulates."""
    waiting, seen = list(graphs), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                yield variable
            waiting.extend(after for after, _ in node.next_functions)


def _is_entered(node: Any) -> bool:
    """Whether an object's attributes may be a step's: no Trainer, lock, thread or logger.

    A user's subclass of a class of torch or Lightning is entered, such as a data set on self.
    """
    if not isinstance(getattr(node, "__dict__", None), dict):
        return False
    if isinstance(node, Tensor | nn.Module | Optimizer):
        return False
    if isinstance(node, (*_CONTAINERS, LRScheduler, SimpleNamespace, argparse.Namespace)):
        return True
    is_standard = any(_package(cls) in _STANDARD for cls in type(node).__mro__[:-1])
    return _package(type(node)) not in _LIBRARIES and not is_standard


def _package(cls: type) -> str:
    return cls.__module__.split(".")[0]


def _parts_of(node: Any, path: str) -> Iterator[tuple[tuple[str, str], Any]]:
    """The items of a container, and an object's attributes, by kind and place.

    Entries of a dict that are kept for each device are left out; and attributes that are containers
    are: the walk finds them by themselves.
    """
    if isinstance(node, dict):
        keys = [(k, k if isinstance(k, tuple) else (k,)) for k in node]
        own = [k for k, parts in keys if not any(isinstance(p, torch.device) for p in parts)]
        yield ("list", path), {k: node[k] for k in own}
    elif isinstance(node, _CONTAINERS):
        yield ("list", path), sorted(node, key=repr) if isinstance(node, set) else list(node)
    if _is_entered(node):
        for name, value in vars(node).items():
            if not isinstance(value, _CONTAINERS):
                yield ("state", f"{path}.{name}"), value


def _is_same(a: Any, b: Any) -> bool:
    """Whether it is the same object, or a list or dict of the same objects."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    are_lists = isinstance(a, list) and isinstance(b, list)
    return list(map(id, a)) == list(map(id, b)) if are_lists else a is b


def _functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """The functions of a module's class, if it is the user's, and of its hooks."""
    for cls in type(module).__mro__:
        if _package(cls) not in _LIBRARIES | _STANDARD:
            yield from (value for value in vars(cls).values() if isinstance(value, FunctionType))
    for table in hook_tables(module):
        hooks = (getattr(hook, "__func__", hook) for hook in table.values())
        yield from (hook for hook in hooks if isinstance(hook, FunctionType))


def _is_array(node: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray) and node.flags.writeable


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _equal(tensor: Tensor, values: Tensor) -> bool:
    """Bit by bit, so that a NaN equals itself."""
    if tensor is values:
        return True
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        return False
    now = tensor.detach().cpu()
    return torch.equal(now, values) or bool(
        torch.isclose(now, values, rtol=0, atol=0, equal_nan=True).all()
    )


# Random generators


class _Generator(NamedTuple):
    """How a random generator is read, set back and seeded, and whether it is one of torch."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[Any], Any]
    is_torch: bool = False


def _generator(node: Any) -> _Generator | None:
    """Of an object that is a generator, or of the modules `random` and `numpy.random`."""
    if isinstance(node, torch.Generator):
        return _Generator(node.get_state, node.set_state, node.manual_seed, True)
    if node is random or isinstance(node, random.Random):
        return _Generator(node.getstate, node.setstate, node.seed)
    own = sys.modules["numpy"].random if "numpy" in sys.modules else None
    if own is not None and (node is own or isinstance(node, own.RandomState)):
        return _Generator(node.get_state, node.set_state, node.seed)
    if own is not None and isinstance(node, own.Generator):
        bits = node.bit_generator
        write = partial(setattr, bits, "state")
        return _Generator(lambda: bits.state, write, lambda seed: write(type(bits)(seed).state))
    return None


def _process_generators(devices: Iterable[torch.device]) -> Iterator[_Generator]:
    for node in (random, torch.default_generator, getattr(sys.modules.get("numpy"), "random", 0)):
        if (generator := _generator(node)) is not None:
            yield generator
    for device in devices:  # no others: a seed would initialize them
        module: Any = torch.get_device_module(device)
        if device.type == "mps":  # there it is the only one
            yield _Generator(module.get_rng_state, module.set_rng_state, module.manual_seed, True)
        else:
            write = partial(_call_with, module.set_rng_state, device)
            seed = partial(_seed, module, device)
            yield _Generator(partial(module.get_rng_state, device), write, seed, True)


def _call_with(write: Callable[..., Any], device: torch.device, state: Any) -> None:
    write(state, device)


def _seed(module: Any, device: torch.device, number: int) -> None:
    with module.device(device):
        module.manual_seed(number)
