"""Modules and their state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules import batchnorm

from lightning_dp.parallel.torch_private.found import getter

Table: TypeAlias = dict[str, Any]

parameter_table: Callable[[nn.Module], Table] = getter(nn.Module(), "_parameters")
"""The parameters of a module itself. `named_parameters` leaves out None, and takes its time."""

buffer_table: Callable[[nn.Module], Table] = getter(nn.Module(), "_buffers")
"""The buffers of a module itself."""

child_table: Callable[[nn.Module], Table] = getter(nn.Module(), "_modules")
"""The children of a module."""


def tables_as_attributes(parameters: Table, buffers: Table, children: Table) -> dict[str, Table]:
    """What gives a module these tables, put into its `__dict__`: it may have had no `__init__`."""
    return {"_parameters": parameters, "_buffers": buffers, "_modules": children}


HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

hook_tables: Callable[[nn.Module], Sequence[dict[int, Any]]] = getter(nn.Module(), *HOOK_TABLES)
"""A module's tables of hooks of forwards and backwards. A test tells of one that is new."""


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether something is called when a backward comes through a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


FIXED_NAMES = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
"""Attributes that every module has, and that stay the same objects; some tables of hooks do not."""


def copy_hook_tables(attributes: dict[str, Any]) -> None:
    """Gives a module, by its `__dict__`, tables of its own with the hooks that it has."""
    attributes.update({name: OrderedDict(attributes[name]) for name in HOOK_TABLES})


BatchNorm = batchnorm._BatchNorm
"""The class of batch norm layers of all dimensions."""


def check_batch_norm_input(layer: BatchNorm, x: Tensor) -> None:
    """Raises the layer's own error if it does not take inputs of so many dimensions."""
    layer._check_input_dim(x)


# State dicts


def format_versions(state_dict: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The versions that modules have noted, by path. Gone: None, as of the oldest releases."""
    return getattr(state_dict, "_metadata", None)


def set_format_versions(state_dict: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    """Notes such versions in a state dict. Gone: nobody reads them."""
    state_dict._metadata = versions  # type: ignore[attr-defined]  # which torch gives it


def is_extra_state(key: str) -> bool:
    """Whether a key of a state dict is that of `get_extra_state`. Gone: not in files."""
    return key.endswith("_extra_state")
