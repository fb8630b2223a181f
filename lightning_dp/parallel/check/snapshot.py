"""A module as it was at one moment: what a call may change on it, to be compared and put back."""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dp.parallel.reduce import GradientsAside, HooksOff, clear_gradients
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.torch_private import (
    FIXED_NAMES,
    buffer_table,
    child_table,
    hook_tables,
    hooked,
    parameter_table,
)

_FRAMEWORKS = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_dp"}
_TRACKERS = {"aim", "clearml", "comet_ml", "mlflow", "neptune", "wandb"}
_BOARDS = {"tensorboard", "tensorboardX"}
_PLAIN_BASES = {"abc", "collections", "dataclasses", "typing", "typing_extensions", "enum"}
_STANDARD = set(sys.stdlib_module_names) - _PLAIN_BASES
"""Packages whose objects, and whose subclasses' objects, are not entered: threads, locks, files."""

_ATOMS = (str, bytes, int, float, complex, type(None), type, FunctionType, torch.dtype)
_CONTAINERS = (dict, list, deque, set)
_ABSENT = object()

Change = tuple[str, str, Any]
"""Kind, path and value now."""


class NotChecked(Exception):
    """Raised, with the reason, where a call cannot be compared or its changes not put back."""


class Snapshot:
    """A module at one moment, with all that hangs on it, and the state of random generators.

    It holds the values of parameters, buffers, other tensors and arrays, gradients, the items of
    lists, dicts, sets and deques, and the attributes of modules and of the user's plain objects,
    wherever they are reached from the module; and the states of the random generators of Python,
    NumPy and torch, on all given devices, and of those that the module holds. Values are kept in
    host memory. It cannot see what a call does to a file, to an environment, to a class, to a
    global number, or to objects of libraries (a data module of the Trainer's, say).

    Until `end`, gradients are None and hooks of parameters do not fire.

    Args:
        module: the module.
        devices: the devices whose random state is kept.
        others: containers, optimizers and schedulers outside of the module that a call may change.
        compared_elsewhere: whether the caller itself compares the state of a module inside, which
            is only restored then.
        most_bytes: how much host memory it may take; None for any.

    Raises:
        NotChecked: on an iterator, open file or uninitialized parameter, which nothing can set
            back, or beyond `most_bytes`.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Iterable[torch.device],
        others: Iterable[Any] = (),
        compared_elsewhere: Callable[[nn.Module], bool] = lambda module: False,
        most_bytes: int | None = None,
    ) -> None:
        self.module = module
        self._compared_elsewhere = compared_elsewhere
        self._most_bytes, self._bytes = most_bytes, 0
        self._graphs: list[Any] = []
        self._leaves: list[Tensor] = []
        self._names = {id(p): ("parameter", name) for name, p in module.named_parameters()}
        self._names |= {id(b): ("buffer", name) for name, b in module.named_buffers()}
        self._devices = {device for device in devices if device.type != "cpu"}
        self._own_generators: list[Any] = []
        self._functions: dict[int, FunctionType] = {}
        self._alive: dict[int, Any] = {}  # an id is unique among living objects only
        self._restores: list[Callable[[], Any]] = list(_process_generators(self._devices))
        self._compared: list[Callable[[], Iterator[Change]]] = []
        self._walk([_Found(module, "self"), *(_Found(other, "", False) for other in others)])
        self._keep_containers_of_functions()
        trained = (*trained_tensors(module), *self._leaves, *_leaves_of(self._graphs))
        self.parameters = list({id(tensor): tensor for tensor in trained}.values())
        self._hooks = [HooksOff(self.parameters[i]) for i in hooked(self.parameters)]
        for hooks in self._hooks:
            hooks.take()
        self._gradients = GradientsAside(self.parameters)

    @property
    def has_graph(self) -> bool:
        """Whether a tensor on the module has a graph, which the real call needs, too.

        Gradients of the graph's leaves are put back as well.
        """
        return bool(self._graphs)

    def changes(self) -> dict[tuple[str, str], Any]:
        """What differs from the snapshot now, by kind and place, as detached host copies.

        Kinds are "parameter", "buffer", "list" (any container's items) and "state" (attributes and
        tensors of plain objects). Attributes that are bound anew on modules are not among them:
        the first replica's value stays by rule.
        """
        found = {
            (kind, path): on_host(now) for look in self._compared for kind, path, now in look()
        }
        for name, buffer in self.module.named_buffers():
            if id(buffer) not in self._alive:  # it was registered, or bound anew
                found["buffer", name] = on_host(buffer)
        return found

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

    def reseed(self, seed: int, *, python_seed: int | None = None) -> None:
        """Seeds all these generators; those of Python and NumPy differently if asked."""
        other = seed if python_seed is None else python_seed
        random.seed(other)
        torch.default_generator.manual_seed(seed)
        for device in self._devices:  # no others: a seed would initialize them
            accelerator: Any = torch.get_device_module(device)
            with nullcontext() if device.type == "mps" else accelerator.device(device):
                accelerator.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(other)
        for generator in self._own_generators:
            _reseed(generator, seed if isinstance(generator, torch.Generator) else other)

    def python_state(self) -> str:
        """Where the generators of Python and NumPy stand."""
        states: list[Any] = [random.getstate()]
        numpys = [sys.modules["numpy"].random] if "numpy" in sys.modules else []
        for generator in (*self._own_generators, *numpys):
            bits = getattr(generator, "bit_generator", None)  # of numpy.random itself, a module
            if bits is not None and hasattr(bits, "state"):
                states.append(bits.state)
            elif not isinstance(generator, torch.Generator):
                has_state = getattr(generator, "getstate", None) or generator.get_state
                states.append([str(part) for part in has_state()])
        return str(states)

    def perturb(self, eps: float, seed: int) -> None:
        """Moves each parameter by a relative `eps` up or down, to see what rounding can make."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters:
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                signs = torch.randint(0, 2, (parameter.numel(),), generator=generator) * 2 - 1
                factors = 1 + eps * signs.to(torch.float64).view(parameter.shape)
                parameter.data.copy_(parameter.detach().cpu().double() * factors)

    # What hangs on the module

    def _walk(self, roots: Iterable[_Found]) -> None:
        waiting = list(roots)[::-1]
        while waiting:
            found = waiting.pop()
            if id(found.node) not in self._alive and not isinstance(found.node, _ATOMS):
                self._alive[id(found.node)] = found.node
                waiting.extend(self._keep(found))

    def _keep(self, found: _Found) -> Iterator[_Found]:
        """Keeps one object; yields what hangs on it."""
        node, path, compared, _ = found
        if isinstance(node, Tensor):
            self._keep_tensor(node, path, compared)
        elif isinstance(node, nn.Module):
            compared = compared and not self._compared_elsewhere(node)
            yield from self._keep_module(node, path, compared)
        elif isinstance(node, _CONTAINERS):
            self._add(_Items(node).restore, _item_changes(found) if compared else None)
            pairs: Any = node.items() if isinstance(node, dict) else enumerate(node)
            yield from (_Found(v, f"{path}[{k!r}]", compared, node) for k, v in pairs)
            yield from self._keep_attributes(node, path, compared)
        elif isinstance(node, tuple | frozenset):
            yield from (_Found(v, f"{path}[{i}]", compared, node) for i, v in enumerate(node))
        elif isinstance(node, LRScheduler):
            yield from self._keep_attributes(node, path, compared=False)
        elif isinstance(node, Optimizer):  # its state changes only where it steps
            yield _Found(node.param_groups, f"{path}.param_groups", False)
        elif (state := _generator_state(node)) is not None:
            self._own_generators.append(node)
            self._add(state)
        elif isinstance(node, Iterator | io.IOBase):
            raise NotChecked(f"it may move {path} on, which cannot be set back.")
        elif _is_array(node):
            self._keep_array(node, path, compared)
        elif _is_plain(node):
            yield from self._keep_attributes(node, path, compared)

    def _keep_module(self, node: nn.Module, path: str, compared: bool) -> Iterator[_Found]:
        """The tables of a module and its attributes: restored, and entered by their own names."""
        own = vars(node)
        self._add(_Items(own).restore, _bound_anew(own, path) if compared else None)
        self._functions |= {id(function): function for function in _functions_of(node)}
        for table in (parameter_table(node), buffer_table(node), child_table(node)):
            self._add(_Items(table).restore)
            yield from (_Found(v, f"{path}.{k}", compared, table) for k, v in table.items())
        for name, value in own.items():
            if name not in FIXED_NAMES:
                yield _Found(value, f"{path}.{name}", compared, own)
            elif isinstance(value, dict):
                self._add(_Items(value).restore)

    def _keep_attributes(self, node: Any, path: str, compared: bool) -> Iterator[_Found]:
        own = getattr(node, "__dict__", None)
        if isinstance(own, dict):
            self._add(_Items(own).restore, _attribute_changes(own, path) if compared else None)
            yield from (_Found(v, f"{path}.{name}", compared, own) for name, v in own.items())

    def _keep_containers_of_functions(self) -> None:
        """Keeps the items of containers that steps and hooks refer to outside of the module.

        Such as a list of a notebook to which a step appends. What is in them is not entered: it may
        be a data set.
        """
        for function in self._functions.values():
            cells = [cell for cell in function.__closure__ or () if _is_filled(cell)]
            outside = [function.__globals__.get(name) for name in function.__code__.co_names]
            for value in (*(cell.cell_contents for cell in cells), *outside):
                if isinstance(value, _CONTAINERS) and id(value) not in self._alive:
                    self._alive[id(value)] = value
                    self._add(_Items(value).restore)

    def _keep_tensor(self, tensor: Tensor, path: str, compared: bool) -> None:
        if is_lazy(tensor):
            raise NotChecked(f"it would initialize {path}, which cannot be set back.")
        if tensor.grad_fn is not None:
            self._graphs.append(tensor.grad_fn)
        elif tensor.requires_grad:
            self._leaves.append(tensor)
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested):
            self._take_bytes(tensor.numel() * tensor.element_size())
            values = _Values(tensor, *self._names.get(id(tensor), ("state", path)))
            self._add(values.restore, values.changes if compared else None)

    def _keep_array(self, node: Any, path: str, compared: bool) -> None:
        numpy = sys.modules["numpy"]
        self._take_bytes(node.nbytes)
        before = node.copy()

        def changes() -> Iterator[Change]:
            if node.dtype != object and not numpy.array_equal(node, before):
                yield "state", path, node.copy()

        self._add(partial(numpy.copyto, node, before), changes if compared else None)

    def _add(
        self, restore: Callable[[], Any], changes: Callable[[], Iterator[Change]] | None = None
    ) -> None:
        self._restores.append(restore)
        if changes is not None:
            self._compared.append(changes)

    def _take_bytes(self, count: int) -> None:
        self._bytes += count
        if self._most_bytes is not None and self._bytes > self._most_bytes:
            gib = self._most_bytes / 2**30
            raise NotChecked(
                f"its tensors take more than {gib:.0f} GiB, and the check copies them."
            )


class _Found(NamedTuple):
    """An object that is reached from the module: from where, and whether it is compared."""

    node: Any
    path: str
    compared: bool = True
    holder: Any = None  # the container or the attributes that it is in; None for a root

    def is_held(self) -> bool:
        """Whether it is still there: another one may have been bound in its place."""
        holder = self.holder.values() if isinstance(self.holder, dict) else self.holder
        return holder is None or any(value is self.node for value in holder)


class _Values:
    """The values of one tensor, and where they are in memory."""

    def __init__(self, tensor: Tensor, kind: str, name: str) -> None:
        self._tensor, self._kind, self._name = tensor, kind, name
        self._memory, self._needs_grad = tensor.detach(), tensor.requires_grad
        self._values = self._memory.to("cpu", copy=True)

    def restore(self) -> None:
        tensor, memory = self._tensor, self._memory
        if _address(tensor) != _address(memory):
            tensor.data = memory.data
        if not _equal(memory.cpu(), self._values):
            memory.data.copy_(self._values)  # through `data`: no version counter moves
        if tensor.is_leaf and tensor.requires_grad != self._needs_grad:
            tensor.requires_grad_(self._needs_grad)

    def changes(self) -> Iterator[Change]:
        is_there = _address(self._tensor) == _address(self._memory)
        if not (is_there and _equal(self._tensor.detach().cpu(), self._values)):
            yield self._kind, self._name, self._tensor


class _Items:
    """The items of a container: which objects they are, not what is in them."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._before = list(node.items() if isinstance(node, dict) else node)

    def restore(self) -> None:
        node, before = self._node, self._before
        if isinstance(node, dict):
            now = [part for item in node.items() for part in item]
            if list(map(id, now)) != [id(part) for item in before for part in item]:
                node.clear()
                for key, value in before:  # `update` of a Counter would count
                    node[key] = value
        elif list(map(id, node)) != list(map(id, before)):
            node.clear()
            node.update(before) if isinstance(node, set) else node.extend(before)


def _item_changes(found: _Found) -> Callable[[], Iterator[Change]]:
    """Whether other items are in a container, and which; nothing if it is held no longer."""
    before = _items_of(found.node)

    def changes() -> Iterator[Change]:
        now = _items_of(found.node)
        if isinstance(now, dict):
            is_same = now.keys() == before.keys() and all(now[key] is before[key] for key in now)
        else:
            is_same = list(map(id, now)) == list(map(id, before))
        if not is_same and found.is_held():
            yield "list", found.path, now

    return changes


def _bound_anew(own: dict[str, Any], path: str) -> Callable[[], Iterator[Change]]:
    """The containers that a step has bound to attributes of a module in the place of others."""
    before = {
        name: value
        for name, value in own.items()
        if isinstance(value, _CONTAINERS) and name not in FIXED_NAMES
    }

    def changes() -> Iterator[Change]:
        for name, value in before.items():
            now = own.get(name)
            if now is not value and isinstance(now, _CONTAINERS):
                yield "list", f"{path}.{name}", _items_of(now)

    return changes


def _attribute_changes(own: dict[str, Any], path: str) -> Callable[[], Iterator[Change]]:
    before = dict(own)

    def changes() -> Iterator[Change]:
        for name in {**before, **own}:
            value = own.get(name, _ABSENT)
            if value is not before.get(name, _ABSENT):
                yield "state", f"{path}.{name}", None if value is _ABSENT else value

    return changes


def _items_of(node: Any) -> Any:
    """The items of a container, without entries of a dict that are kept for each device."""
    if not isinstance(node, dict):
        return sorted(node, key=repr) if isinstance(node, set) else list(node)

    def is_of_device(key: Any) -> bool:
        parts = key if isinstance(key, tuple) else (key,)
        return any(isinstance(part, torch.device) for part in parts)

    return {key: value for key, value in node.items() if not is_of_device(key)}


def trained_tensors(module: nn.Module) -> list[Tensor]:
    """The parameters of a module, and those of its buffers on which gradients accumulate."""
    leaves = [buffer for buffer in module.buffers() if buffer.is_leaf and buffer.requires_grad]
    unique: dict[int, Tensor] = {id(tensor): tensor for tensor in (*module.parameters(), *leaves)}
    return list(unique.values())


def on_host(node: Any) -> Any:
    """A copy of a tree with its tensors detached, in host memory."""
    return tree.map_leaves(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, node
    )


def _leaves_of(graphs: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors on which a backward through these graphs accumulates."""
    waiting, seen = list(graphs), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        waiting.extend(after for after, _ in node.next_functions)


def _is_plain(node: Any) -> bool:
    """Whether an object's attributes are the user's: no Trainer, lock, thread or logger.

    A user's subclass of a class of torch or Lightning is plain, such as a data set on self.
    """
    if isinstance(node, SimpleNamespace | argparse.Namespace):
        return True
    is_libraries = _package(type(node)) in _FRAMEWORKS | _TRACKERS | _BOARDS
    is_standard = any(_package(cls) in _STANDARD for cls in type(node).__mro__[:-1])
    return hasattr(node, "__dict__") and not is_libraries and not is_standard


def _package(cls: type) -> str:
    return cls.__module__.split(".")[0]


def _functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """The functions of a module's class, if it is the user's, and of its hooks."""
    for cls in type(module).__mro__:
        if _package(cls) not in _FRAMEWORKS | _STANDARD:
            yield from (value for value in vars(cls).values() if isinstance(value, FunctionType))
    for table in hook_tables(module):
        for hook in table.values():
            function = getattr(hook, "__func__", hook)
            if isinstance(function, FunctionType):
                yield function


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # it raises where the cell is empty
    except ValueError:
        return False
    return True


def _is_array(node: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray) and node.flags.writeable


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, so that a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


# Random generators


def _process_generators(devices: Iterable[torch.device]) -> Iterator[Callable[[], Any]]:
    """What sets the generators of the process back."""
    yield partial(random.setstate, random.getstate())
    yield partial(torch.set_rng_state, torch.get_rng_state())
    if "numpy" in sys.modules:
        generators = sys.modules["numpy"].random
        yield partial(generators.set_state, generators.get_state())
    for device in devices:
        module = torch.get_device_module(device)
        name = () if device.type == "mps" else (device,)  # there it is the only one
        yield partial(module.set_rng_state, module.get_rng_state(*name), *name)


def _generator_state(node: Any) -> Callable[[], Any] | None:
    """What sets a generator of the module's back; None if it is none."""
    numpy = sys.modules.get("numpy")
    if isinstance(node, torch.Generator):
        return partial(node.set_state, node.get_state())
    if isinstance(node, random.Random):
        return partial(node.setstate, node.getstate())
    if numpy is not None and isinstance(node, numpy.random.Generator):
        bits: Any = node.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if numpy is not None and isinstance(node, numpy.random.RandomState):
        return partial(node.set_state, node.get_state())
    return None


def _reseed(generator: Any, seed: int) -> None:
    """Of torch, Python or NumPy."""
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        getattr(generator, "manual_seed", generator.seed)(seed)
