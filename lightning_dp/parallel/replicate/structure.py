"""What a module is made of: submodules, parameters and buffers, and what in it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp.parallel.torch_private import (
    buffer_table,
    child_table,
    compiled_function,
    compiled_inner,
    hook_tables,
    parameter_table,
)

OwnAttributes: TypeAlias = Callable[[nn.Module, nn.Module, int, torch.device], dict[str, Any]]
"""Takes (module, twin, k, device); returns attributes that the twin, its copy, has for itself."""


class ModuleStructure:
    """The modules of a root, and its tensors that are replicated: those on the root's device.

    Modules that a list, tuple or dict on a module holds without registering them belong to it.

    Attributes:
        modules: the modules.
        parameters: the parameters.
        buffer_tables: the modules' buffers by name.
        owners: what has attributes: modules and parameters.
        tables: containers whose items change where a parameter, submodule or buffer is added,
            replaced or removed.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.device = device
        self.modules: list[nn.Module] = []
        self._walk(root, set())
        bound = list(map(parameter_table, self.modules))
        found = chain.from_iterable(map(dict.values, bound))
        unique: dict[int, nn.Parameter] = {id(p): p for p in found if self.is_replicated(p)}
        self.parameters = list(unique.values())
        self.buffer_tables = list(map(buffer_table, self.modules))
        self.owners: list[Any] = [*self.modules, *self.parameters]
        bound += map(child_table, self.modules)
        names = map(dict.keys, self.buffer_tables)  # what they name changes in every step
        self.tables: list[Collection[Any]] = [*map(dict.values, bound), *names]
        self.hook_tables = list(chain.from_iterable(map(hook_tables, self.modules)))

    def _walk(self, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        _check_replicable(module)
        self.modules.append(module)
        for child in child_table(module).values():
            if child is not None:
                self._walk(child, seen)
        for _, hidden in layers_in(vars(module), ""):
            self._walk(hidden, seen)

    def is_replicated(self, tensor: Tensor | None) -> bool:
        """Whether it lies on the root's device; replicas share tensors that lie elsewhere."""
        return tensor is not None and tensor.device == self.device

    def buffers(self) -> list[Tensor]:
        """The present buffers that are replicated, shared ones once, without parameters."""
        buffers = chain.from_iterable(map(dict.values, self.buffer_tables))
        found = {id(buffer): buffer for buffer in buffers if self.is_replicated(buffer)}
        for parameter in self.parameters:
            found.pop(id(parameter), None)
        return list(found.values())


def layers_in(value: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules in lists, tuples and dicts, with the expressions that lead to them."""
    pairs: Any = ()
    if type(value) in (list, tuple):
        pairs = enumerate(value)
    elif type(value) is dict:
        pairs = value.items()
    for key, item in pairs:
        place = f"{path}[{key!r}]"
        if isinstance(item, nn.Module):
            yield place, item
        elif type(item) in (list, tuple, dict):
            yield from layers_in(item, place)


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"Expected modules written in Python, got {type(module).__qualname__}, which "
            "torch.jit compiled and which cannot be replicated. Use the original module, or "
            "one device."
        )
    for name, parameter in parameter_table(module).items():
        if parameter is not None and nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Expected initialised parameters, got {type(module).__qualname__}.{name}, whose "
                "shape is not known yet. Run one batch through the module before training."
            )


def refuse_limited_norms(modules: Sequence[nn.Module]) -> None:
    """Raises a ValueError about embeddings with `max_norm`, whose forwards write to weights."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"max_norm: expected None on several devices, got {module.max_norm} in "
                f"{type(module).__qualname__}, whose forward shortens rows of the root's weight. "
                "Shorten them with torch.renorm after each optimizer step, or use one device."
            )


def holds_compiled_code(root: nn.Module) -> bool:
    """Whether submodules, their methods, or global names in these are results of `torch.compile`.

    The copier of attributes finds compiled functions on `self`. Any others are noticed by dynamo's
    counter when they are compiled, and replicas run in order from then on.
    """
    modules = list(root.modules())
    classes = {cls for module in modules for cls in type(module).__mro__}
    members = [member for cls in classes for member in vars(cls).values()]
    functions = [member for member in members if isinstance(member, FunctionType)]
    used = [f.__globals__.get(name) for f in functions for name in f.__code__.co_names]
    return any(compiled_inner(module) is not None for module in modules) or any(
        compiled_function(value) is not None for value in functions + used
    )


def compiled_attributes(original: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """What a replica's `torch.compile(module)` has for itself: the calls of its inner module."""
    inner = compiled_inner(twin)
    if inner is None:
        return {}
    # The root's wrapper has been compiled with options that only its context knows.
    compiled = type(original)(inner, original.dynamo_ctx)
    tables = nn.Module().__dict__.keys() | {"dynamo_ctx"}
    return {name: value for name, value in compiled.__dict__.items() if name not in tables}
