"""Compiled submodules: what `torch.compile(module)` returns, on replicas."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_dp.parallel.torch_private import compiled_inner


def compiles(module: nn.Module) -> bool:
    """Whether a module has compiled submodules: its replicas are then to run in order.

    `torch.compile` compiles during calls. It does so once at a time, but what it looks at to tell
    whether it has to is not safe from other threads: now and then it would compile for no reason.
    """
    return any(compiled_inner(each) is not None for each in module.modules())


def compiled_attributes(original: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """What a replica's wrapper (`twin`) has for itself: the calls of its own inner module."""
    inner = compiled_inner(twin)
    if inner is None:
        return {}
    # The root's wrapper has been compiled with options that only its context knows.
    compiled = type(original)(inner, original.dynamo_ctx)
    tables = nn.Module().__dict__.keys() | {"dynamo_ctx"}
    return {name: value for name, value in compiled.__dict__.items() if name not in tables}
