"""Random operations that draw one number each, so that shards and the whole batch draw the same.

[Note: one number per draw]
A step that adds noise to each sample draws n numbers for n samples: a shard cannot draw the same
ones as the whole batch does. To compare such a step all the same, each random operation draws a
single number and gives it to all elements. With the generators seeded alike before each replica's
call, the numbers do not depend on how many samples there are, and what still differs is not chance.
A mask that keeps or drops whole samples would hide all that they contribute if its one number is
"drop": Bernoulli draws are always 1, and the comparison is made with several seeds.
`randperm` returns n-1 ... 0: a step that mixes samples then mixes other pairs in a shard than in
the whole batch, and the check sees that. Samples of a multinomial stay random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dp.parallel.torch_private import TorchDispatchMode

_aten = torch.ops.aten
_IN_PLACE = {
    *(_aten.normal_, _aten.uniform_, _aten.exponential_, _aten.random_, _aten.log_normal_),
    *(_aten.cauchy_, _aten.geometric_),
}
_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like}
_SIZED = {_aten.rand, _aten.randn, _aten.randint}


class OneNumberPerDraw(TorchDispatchMode):
    """Makes random operations draw one number for all elements, see the note above.

    Attributes:
        names: of the random operations that ran.
        dtypes: in which floating point numbers were computed.
        uncontrolled: whether a random operation ran as it is (samples of a multinomial, dropout
            inside a fused kernel, numbers of the module's own generator).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: dict[str, None] = {}
        self.dtypes: set[torch.dtype] = set()
        self.uncontrolled = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        drawn = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names[str(func.overloadpacket).removeprefix("aten.")] = None
            # A replica's own generator draws other numbers than the root's.
            if "out" not in kwargs and kwargs.get("generator") is None:
                drawn = _draw(func, args, kwargs)
            self.uncontrolled |= drawn is None
        result = func(*args, **kwargs) if drawn is None else drawn
        if isinstance(result, Tensor) and result.is_floating_point():
            self.dtypes.add(result.dtype)
        return result


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random operation with one number for all elements; None if not known how."""
    kind = func.overloadpacket
    if kind in _IN_PLACE:
        return args[0].copy_(func(args[0].new_empty(()), *args[1:], **kwargs))
    if kind in _LIKE:
        one = func(args[0].new_empty(()), *args[1:], **kwargs)
        return torch.empty_like(args[0], dtype=one.dtype, device=one.device).copy_(one)
    if kind in _SIZED:
        position = next(i for i, a in enumerate(args) if isinstance(a, list | tuple))
        number = func(*args[:position], [], *args[position + 1 :], **kwargs)
        return number.expand(args[position]).clone()
    if kind is _aten.randperm:
        return func(*args, **kwargs).sort(descending=True).values
    if kind is _aten.native_dropout and len(args) == 3 and args[1] < 1:
        x, p, trains = args  # accelerators have one kernel for F.dropout
        kept = torch.ones_like(x, dtype=torch.bool)
        return (x / (1 - p) if trains is not False else x.clone()), kept
    if kind in (_aten.bernoulli, _aten.bernoulli_):  # 1 wherever it can be
        is_given, is_in_place = len(args) > 1, kind is _aten.bernoulli_
        p = args[1] if is_given else kwargs.get("p", 0.5 if is_in_place else args[0])
        ones = (torch.as_tensor(p, device=args[0].device) > 0).expand(args[0].shape)
        return args[0].copy_(ones) if is_in_place else ones.to(args[0].dtype)
    if kind is _aten.normal and any(isinstance(arg, Tensor) for arg in args[:2]):
        mean, std = (*args[:2], 1.0)[:2]
        like = mean if isinstance(mean, Tensor) else std
        return (mean + std * torch.randn((), device=like.device).to(like.dtype)).to(like.dtype)
    return None
