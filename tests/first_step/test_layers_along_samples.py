"""Layers that go along samples are told: their sequence, or their space, is the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Classifier, assert_same, run
from test_relations import check_that_a_fit_is_told, found
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.parallel.additive.findings import A_LAYER, Related
from lightning_dp.parallel.additive.layers import mixed_lengths, samples_in

pytestmark = pytest.mark.usefixtures("one_thread")

MISSING = "along samples (is batch_first=True missing?). What"


class Layered(Classifier):
    """A layer between the features and the classes."""

    layer_of: Any = None
    does: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = type(self).layer_of()

    def forward(self, x: Tensor) -> Any:
        return type(self).does(self.layer, self.net(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def layered(layer: Callable[[], nn.Module], does: Callable[[Any, Tensor], Tensor]) -> Any:
    return type(
        "Layered", (Layered,), {"layer_of": staticmethod(layer), "does": staticmethod(does)}
    )


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, **options)


def in_pairs(z: Tensor) -> Tensor:
    """Two time steps of each sample."""
    return torch.stack([z, z.flip(-1)], 1)


def of_attention(layer: nn.MultiheadAttention, z: Tensor, **options: Any) -> Tensor:
    out: Tensor = layer(z, z, z, need_weights=False, **options)[0]
    return out


ALONG: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], str]] = {
    "lstm": (lambda: nn.LSTM(3, 3), lambda rnn, z: rnn(in_pairs(z))[0][:, -1], f"lstm {MISSING}"),
    "gru": (lambda: nn.GRU(3, 3), lambda rnn, z: rnn(z)[0], f"gru {MISSING}"),
    "rnn": (
        lambda: nn.RNN(3, 3, nonlinearity="relu"),
        lambda rnn, z: rnn(in_pairs(z))[0].mean(1),
        f"rnn_relu {MISSING}",
    ),
    "encoder": (encoder, lambda layer, z: layer(in_pairs(z))[:, 0], f"attention {MISSING}"),
    "attention": (
        lambda: nn.MultiheadAttention(3, 1),
        lambda layer, z: of_attention(layer, in_pairs(z)).mean(1),
        f"attention {MISSING}",
    ),
    "dot product": (
        nn.Identity,
        lambda _, z: F.scaled_dot_product_attention(*[z[None, None]] * 3, is_causal=True)[0, 0],
        "attention along samples. What",
    ),
    "convolution": (
        lambda: nn.Conv1d(3, 3, 3, padding=1),
        lambda layer, z: layer(z.T[None])[0].T,
        "conv1d along samples. What",
    ),
    "pool": (
        lambda: nn.AvgPool1d(3, 1, 1),
        lambda layer, z: layer(z.T[None])[0].T,
        "avg_pool1d along samples. What",
    ),
    "norm": (
        nn.Identity,
        lambda _, z: F.layer_norm(z.T, (len(z),)).T,
        "layer_norm along samples. What",
    ),
    "group norm": (
        lambda: nn.GroupNorm(1, 3),
        lambda layer, z: layer(z.T[None])[0].T,
        "group_norm along samples. What",
    ),
}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", ALONG)
def test_a_layer_along_samples_is_told_once_and_is_not_one_devices(name: str) -> None:
    layer, does, text = ALONG[name]
    check_that_a_fit_is_told(layered(layer, does), f"got {text}")


def packed(rows: Tensor, lengths: Tensor) -> Any:
    of_each = {"batch_first": True, "enforce_sorted": False}
    return nn.utils.rnn.pack_padded_sequence(rows, lengths.cpu(), **of_each)


OF_EACH: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(3, 3, batch_first=True), lambda rnn, z: rnn(in_pairs(z))[0][:, -1]),
    "time first": (
        lambda: nn.GRU(3, 3),
        lambda rnn, z: rnn(in_pairs(z).transpose(0, 1))[0][-1],
    ),
    "packed": (
        lambda: nn.GRU(3, 3, batch_first=True),
        lambda rnn, z: rnn(packed(in_pairs(z), 1 + (z[:, 0] > z[:, 1]).long()))[1][0],
    ),
    "encoder": (
        lambda: encoder(batch_first=True),
        lambda layer, z: layer(in_pairs(z))[:, 0],
    ),
    "time first encoder": (
        encoder,
        lambda layer, z: layer(in_pairs(z).transpose(0, 1))[0],
    ),
    "convolution": (
        lambda: nn.Conv1d(1, 3, 3),
        lambda layer, z: layer(z[:, None])[:, :, 0],
    ),
    "points": (
        lambda: nn.Conv1d(3, 3, 1),
        lambda layer, z: layer(z.T[None])[0].T,
    ),
    "pool": (
        lambda: nn.MaxPool1d(3, 1, 1),
        lambda layer, z: layer(z[:, None])[:, 0],
    ),
    "norm": (lambda: nn.LayerNorm(3), lambda layer, z: layer(z)),
    "group norm": (
        lambda: nn.GroupNorm(1, 3),
        lambda layer, z: layer(in_pairs(z).transpose(1, 2)).mean(2),
    ),
    "a group for each": (
        nn.Identity,
        lambda _, z: F.group_norm(z.reshape(1, -1, 1), len(z)).view_as(z),
    ),
}


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", OF_EACH)
def test_a_layer_that_has_each_sample_by_itself_is_as_on_one_device_and_is_not_told(
    name: str,
) -> None:
    make = layered(*OF_EACH[name])
    assert_same(run(make, 3), run(make, 1), atol=1e-5)


def test_a_layer_along_what_only_is_another_length_is_not_told() -> None:
    """As of nodes of graphs, or of what was padded."""
    conv = nn.Conv1d(4, 4, 3, padding=1)
    lengths = {3: 7, 2: 5}
    rows = lambda x: F.pad(x, (0, 0, 0, lengths[len(x)] - len(x)))
    assert found(lambda x: conv(rows(x).T[None]).square().sum()) is None
    assert found(lambda x: conv(x.T[None]).square().sum()) == Related(A_LAYER, "conv1d")


X, LONG = torch.ones(5, 3, 8), torch.tensor([2, 1])


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("lstm", (X, (X, X), [], True, 1, 0.0, True, False, False), {}, (5,)),
        ("lstm", (X, (X, X), [], True, 1, 0.0, True, False, True), {}, (3,)),
        ("gru", (X, LONG, X, [], True, 1, 0.0, True, False), {}, ()),
        ("conv2d", (X[None], torch.ones(2, 5, 3, 1)), {}, (3,)),
        ("conv_transpose1d", (), {"input": X, "weight": torch.ones(3, 2, 2)}, (8,)),
        ("avg_pool1d", (X, (2,)), {}, (8,)),
        ("max_pool2d", (X, 2), {}, (3, 8)),
        ("max_pool2d", (X,), {"kernel_size": (1, 2)}, (8,)),
        ("avg_pool3d", (X, 1), {}, ()),
        ("layer_norm", (X,), {"normalized_shape": (8,)}, (8,)),
        ("group_norm", (X, 3), {}, (1, 8)),
        ("scaled_dot_product_attention", (X, X, X), {}, (3,)),
        ("scaled_dot_product_attention", (X, X[:, :1], X[:, :1]), {}, ()),
        ("scaled_dot_product_attention", (X, X, X, torch.ones(3, 3)), {}, ()),
        ("multi_head_attention_forward", (X, X, X), {}, (5,)),
        ("multi_head_attention_forward", (X, X, X), {"attn_mask": X}, ()),
        ("multi_head_attention_forward", (X, X, X), {"attn_mask": X, "is_causal": True}, (5,)),
        ("linear", (X, X), {}, ()),
    ],
)
def test_lengths_are_where_layers_take_them(
    name: str, args: Any, kwargs: Any, expected: tuple[int, ...]
) -> None:
    assert mixed_lengths(name, args, kwargs) == expected


def test_nested_tensors_have_no_lengths() -> None:
    rows = torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged)
    assert mixed_lengths("layer_norm", (rows, (8,)), {}) == ()


def test_batch_first_is_asked_for_where_a_layer_has_it() -> None:
    has_it = lambda name: "batch_first" in samples_in(name)
    assert has_it("rnn_tanh") and has_it("multi_head_attention_forward")
    assert not has_it("conv3d") and not has_it("scaled_dot_product_attention")
