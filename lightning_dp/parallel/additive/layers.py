"""Layers: along which lengths a layer makes of each element what others are.

A recurrent layer goes along its sequence, attention is over it, and convolutions and pools go along
space. Where that is as long as a shard has samples, these meet: mostly `batch_first=True` is
missing. Batch norm is left out, as it is told elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

Lengths: TypeAlias = "tuple[int, ...]"
_Argument: TypeAlias = Callable[..., Any]  # by its place and its name


def mixed_lengths(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lengths:
    """How long the dimensions are along which a layer mixes what it takes.

    None of a layer that is not known, nor where a mask says who may see whom.

    Args:
        name: of the function that computes the layer.
        args: its arguments.
        kwargs: those by name.

    Example:
        >>> import torch
        >>> x = torch.ones(5, 3, 8)
        >>> mixed_lengths("conv1d", (x, torch.ones(2, 3, 7)), {})
        (8,)
        >>> mixed_lengths("layer_norm", (x, (3, 8)), {})
        (3, 8)
    """
    of_name = _LAYERS.get(name)
    if of_name is None or any([isinstance(own, Tensor) and own.is_nested for own in args]):
        return ()

    def argument(place: int, key: str, default: Any = None) -> Any:
        return args[place] if place < len(args) else kwargs.get(key, default)

    return of_name(argument)


def samples_in(name: str) -> str:
    """What is told of a layer that goes along samples.

    Where these come second unless it is told.

    Example:
        >>> samples_in("gru")
        'gru along samples (is batch_first=True missing?)'
    """
    layer = "attention" if "attention" in name else name
    takes_sequences = _LAYERS[name] in (_recurrent, _multi_head)
    return f"{layer} along samples{' (is batch_first=True missing?)' if takes_sequences else ''}"


def _recurrent(argument: _Argument) -> Lengths:
    rows, second = argument(0, "input"), argument(1, "hx")
    if isinstance(second, Tensor) and not second.is_floating_point():
        return ()  # of what is packed: how many samples there are at each time
    return (rows.shape[1 if argument(8, "batch_first", False) else 0],)


def _multi_head(argument: _Argument) -> Lengths:
    queries, keys = (argument(*at).shape[0] for at in ((0, "query"), (1, "key")))  # time is first
    mask, is_causal = argument(16, "attn_mask"), argument(24, "is_causal", False)
    return (keys,) if queries == keys and (mask is None or is_causal) else ()


def _dot_product(argument: _Argument) -> Lengths:
    queries, keys = (argument(*at).shape[-2] for at in ((0, "query"), (1, "key")))
    return (keys,) if queries == keys and argument(3, "attn_mask") is None else ()


def _convolution(argument: _Argument) -> Lengths:
    return _in_space(argument(0, "input"), argument(1, "weight").shape[2:])


def _pool(rank: int) -> Callable[[_Argument], Lengths]:
    def lengths(argument: _Argument) -> Lengths:
        size = argument(1, "kernel_size")
        is_one = isinstance(size, int) or len(size) == 1
        return _in_space(argument(0, "input"), [size] * rank if is_one else size)

    return lengths


def _in_space(rows: Tensor, kernel: Sequence[Any]) -> Lengths:
    pairs = zip(rows.shape[-len(kernel) :], kernel, strict=True)
    return tuple([length for length, size in pairs if size not in (1, (1,), [1])])


def _layer_norm(argument: _Argument) -> Lengths:
    return tuple(argument(1, "normalized_shape"))


def _group_norm(argument: _Argument) -> Lengths:
    rows = argument(0, "input")
    return (rows.shape[1] // argument(1, "num_groups"), *rows.shape[2:])


_LAYERS: dict[str, Callable[[_Argument], Lengths]] = {
    **dict.fromkeys(("gru", "lstm", "rnn_relu", "rnn_tanh"), _recurrent),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    **dict.fromkeys([f"conv{rank}d" for rank in (1, 2, 3)], _convolution),
    **dict.fromkeys([f"conv_transpose{rank}d" for rank in (1, 2, 3)], _convolution),
    **{f"{kind}_pool{rank}d": _pool(rank) for kind in ("avg", "max") for rank in (1, 2, 3)},
    "group_norm": _group_norm,
    "multi_head_attention_forward": _multi_head,
    "scaled_dot_product_attention": _dot_product,
}
