"""Compiled submodules: what `torch.compile(module)` returns, on replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_dp.parallel.split import Sizes


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the wrapper that `torch.compile` puts around another one."""
    return "_orig_mod" in module._modules


class Compilations:
    """What `torch.compile` has seen of a module.

    What it has not seen yet it compiles during the call, which replicas must not do all at once:
    they are then to run one after another.

    Attributes:
        surprises: whether calls may be compiled again for reasons that nobody foresees: each of
            them then counts as new.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._compiles = any(map(is_compiled, module.modules()))
        self._seen: set[tuple[Any, ...]] = set()
        self.surprises = False

    def is_new(self, stage: str, sizes: Sizes) -> bool:
        """Whether a stage has not run yet with shards of these sizes, in the present modes."""
        if not self._compiles:
            return False
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self._module.training)
        before = len(self._seen)
        self._seen.add((stage, sizes, *modes))
        return self.surprises or len(self._seen) > before


def compiled_attributes(original: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """What the wrapper on a replica has for itself: the calls of its own inner module.

    Args:
        original: a module of the root.
        twin: the replica's, with the attributes of the original; a wrapper calls its inner module.
    """
    if not is_compiled(original):
        return {}
    inner: Any = twin._modules["_orig_mod"]
    # The root's wrapper has been compiled with options that only its context knows.
    compiled = type(original)(inner, original.dynamo_ctx)
    tables = nn.Module().__dict__.keys() | {"dynamo_ctx"}
    return {name: value for name, value in compiled.__dict__.items() if name not in tables}
