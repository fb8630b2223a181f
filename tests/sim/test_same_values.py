"""Models and ops give on a simulated device what they give on the CPU, gradients included."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Case = Callable[[torch.device], list[Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def model_case(name: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> None:
    """A module on random inputs: outputs, and gradients of inputs and parameters."""

    def run(device: torch.device) -> list[Tensor]:
        return trained(make().to(device), *(leaf(device, *shape) for shape in shapes))

    CASES[name] = run


def leaf(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device).requires_grad_()


def tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [tensor for item in output for tensor in tensors(item)]


def trained(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    outputs = tensors(module(*inputs))
    torch.stack([output.float().square().mean() for output in outputs]).sum().backward()
    state = [*module.parameters(), *inputs]
    gradients = [tensor.grad for tensor in state if tensor.grad is not None]
    assert gradients
    return [*outputs, *gradients, *module.buffers()]


def graded(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output.float().square().sum(), inputs, retain_graph=True)]


model_case(
    "cnn",
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ),
    (4, 3, 16, 16),
)
model_case("conv1d_without_bias", lambda: nn.Conv1d(3, 5, 3, bias=False, dilation=2), (2, 3, 11))
model_case("conv3d", lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4))
model_case(
    "transposed_conv",
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
    (2, 4, 5, 5),
)
model_case(
    "channels_last_conv",
    lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    (2, 3, 6, 6),
)
model_case("batch_norm", lambda: nn.BatchNorm1d(6), (8, 6))
model_case("batch_norm_eval", lambda: nn.BatchNorm2d(3).eval(), (2, 3, 4, 4))
model_case("group_norm", lambda: nn.GroupNorm(2, 6), (4, 6, 5))
model_case("instance_norm", lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 5, 5))
model_case("layer_norm", lambda: nn.LayerNorm([4, 5]), (3, 4, 5))
model_case("rms_norm", lambda: nn.RMSNorm(5), (3, 5))
model_case("lstm", lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True), (7, 3, 4))
model_case("gru", lambda: nn.GRU(4, 6, num_layers=2, bidirectional=True), (7, 3, 4))
model_case("gru_without_bias", lambda: nn.GRU(4, 6, bias=False), (5, 2, 4))
model_case("rnn", lambda: nn.RNN(4, 6), (7, 3, 4))
model_case("lstm_cell", lambda: nn.LSTMCell(4, 6), (3, 4))
model_case("gru_cell", lambda: nn.GRUCell(4, 6), (3, 4))
model_case(
    "transformer_encoder",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
    ),
    (3, 5, 8),
)
model_case(
    "transformer_decoder",
    lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    (3, 5, 8),
    (3, 6, 8),
)
model_case("dropout_of_all", lambda: nn.Dropout(1.0), (4, 5))
model_case("dropout_eval", lambda: nn.Dropout(0.5).eval(), (4, 5))
model_case("pixel_shuffle", lambda: nn.PixelShuffle(2), (2, 8, 3, 3))
model_case("prelu", lambda: nn.PReLU(3), (2, 3, 4))
model_case("bilinear", lambda: nn.Bilinear(3, 4, 5), (2, 3), (2, 4))
model_case("cosine_similarity", lambda: nn.CosineSimilarity(), (4, 5), (4, 5))


@case
def transformer_encoder_fast_path(device: torch.device) -> list[Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    # On the CPU, nested tensors would come with a warning.
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=device.type == "sim")
    x, lengths = torch.randn(3, 5, 8).to(device), torch.tensor([[5], [3], [4]])
    padding = (torch.arange(5) >= lengths).to(device)
    encoder.eval().to(device)
    with torch.no_grad():
        padded = encoder(x, src_key_padding_mask=padding)
        return [encoder(x), padded.masked_fill(padding[..., None], 0)]


@case
def attention_with_padding(device: torch.device) -> list[Tensor]:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
    x, padding = leaf(device, 3, 5, 8), torch.arange(5).expand(3, 5) > 2
    output, weights = attention(x, x, x, key_padding_mask=padding.to(device))
    return [weights, *graded(output, x)]


@case
def sdpa(device: torch.device) -> list[Tensor]:
    q, k, v = (leaf(device, 2, 3, 5, 4) for _ in range(3))
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.rand(5, 5) > 0.3
    return graded(causal, q, k, v) + graded(
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(device)), q, k, v
    )


@case
def packed_lstm(device: torch.device) -> list[Tensor]:
    lstm, x = nn.LSTM(4, 6, batch_first=True).to(device), leaf(device, 3, 5, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
    output, lengths = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
    assert lengths.tolist() == [5, 3, 2]
    return graded(output, x, *lstm.parameters())


@case
def embedding(device: torch.device) -> list[Tensor]:
    table = nn.Embedding(10, 4, padding_idx=0, max_norm=1.0).to(device)
    return graded(table(torch.randint(0, 10, (3, 5)).to(device)), table.weight)


def _embedding_bag(mode: str) -> Case:
    def run(device: torch.device) -> list[Tensor]:
        table = nn.EmbeddingBag(10, 4, mode=mode).to(device)
        index, offsets = torch.randint(0, 10, (9,)), torch.tensor([0, 3, 3, 7])
        return graded(table(index.to(device), offsets.to(device)), table.weight)

    return run


for _mode in ("sum", "mean", "max"):
    CASES[f"embedding_bag_{_mode}"] = _embedding_bag(_mode)


@case
def seeded_dropout(device: torch.device) -> list[Tensor]:
    x = leaf(device, 50, 40)
    _seed(device, 5)
    return graded(F.dropout(x, 0.3), x)


@case
def seeded_dropout_variants(device: torch.device) -> list[Tensor]:
    x = torch.randn(4, 6, 5).to(device)
    _seed(device, 5)
    return [
        F.dropout1d(x),
        F.alpha_dropout(x, training=True),
        F.feature_alpha_dropout(x, training=True),
    ]


@case
def seeded_random_numbers(device: torch.device) -> list[Tensor]:
    _seed(device, 7)
    options = {"device": device}
    kinds = [torch.rand(100, **options), torch.randn(100, **options), torch.randperm(50, **options)]
    kinds += [torch.randint(9, (20,), **options), torch.multinomial(torch.ones(8, **options), 3)]
    kinds += [torch.rand_like(kinds[0]), torch.bernoulli(kinds[0]), torch.poisson(kinds[0] * 5)]
    kinds += [torch.empty(9, **options).exponential_(), torch.normal(kinds[1], kinds[0])]
    return [kind.float() for kind in kinds]


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "sim":
        torch.sim.default_generators[device.index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@case
def cdist(device: torch.device) -> list[Tensor]:
    a, b = leaf(device, 4, 6), leaf(device, 5, 6)
    return graded(torch.cdist(a, b), a, b) + graded(F.pdist(a), a)


@case
def topk(device: torch.device) -> list[Tensor]:
    x = leaf(device, 4, 9)
    values, indices = x.topk(3, dim=1)
    return [indices, *graded(values, x), *x.kthvalue(2), x.argmax(1), *x.median(1)]


@case
def sort(device: torch.device) -> list[Tensor]:
    x = leaf(device, 4, 9)
    values, indices = x.sort(dim=1, descending=True)
    return [
        indices,
        *graded(values, x),
        *torch.unique(x.round(), return_inverse=True),
        x.argsort(0),
    ]


@case
def index_put(device: torch.device) -> list[Tensor]:
    x, values = leaf(device, 5, 4), leaf(device, 3, 4)
    rows = torch.tensor([0, 2, 2])
    added = x.index_put((rows.to(device),), values, accumulate=True)
    masked = x.clone()
    masked[masked > 0] = 0.5
    masked[:, rows] += 1  # an index on the CPU, as CUDA allows
    return graded(added, x, values) + graded(masked, x) + graded(x[rows], x)


@case
def gather_and_scatter(device: torch.device) -> list[Tensor]:
    x, index = leaf(device, 4, 5), torch.randint(0, 4, (3, 5)).to(device)
    gathered = x.gather(0, index)
    zeros = torch.zeros(4, 5, device=device)
    summed = zeros.scatter_add(0, index, gathered)
    taken = x.index_select(1, torch.tensor([3, 1]).to(device)).masked_fill(x[:, :2] > 0, 2.0)
    return graded(gathered, x) + graded(summed, x) + graded(taken, x) + [x.masked_select(x > 0)]


@case
def views_and_in_place(device: torch.device) -> list[Tensor]:
    x = leaf(device, 4, 6)
    y = x.clone()
    y[1:3].t().mul_(2)
    y.view(2, 2, 6).select(1, 0).add_(1)
    y.unfold(1, 3, 3)[..., 0] *= 3
    z = y.unsqueeze(0).transpose_(0, 1).squeeze_(1)
    assert z.data_ptr() == y.data_ptr()
    return graded(torch.cat([z, y.flip(0), y.roll(1, 1), y.expand(4, 6)]), x)


@case
def out_arguments(device: torch.device) -> list[Tensor]:
    a, b = torch.randn(3, 4).to(device), torch.randn(4, 5).to(device)
    grown = torch.empty(0, device=device)
    part = torch.zeros(3, 10, device=device)
    torch.mm(a, b, out=part[:, ::2])
    values, indices = (
        torch.empty(0, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
    )
    torch.sort(a, out=(values, indices))
    assert torch.mm(a, b, out=grown) is grown
    return [grown, part, values, indices, torch.cumsum(a, 0, out=torch.empty_like(a))]


@case
def inference_mode(device: torch.device) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(device)
    with torch.inference_mode():
        output = model(torch.randn(5, 4).to(device))
        output[1:].mul_(2)
        return [output.clone(), *model.buffers()]


@case
def complex_numbers(device: torch.device) -> list[Tensor]:
    x = leaf(device, 4, 8)
    spectrum = torch.fft.rfft(x)
    product = spectrum.conj() @ spectrum.mT
    stft = torch.stft(x, 4, window=torch.ones(4, device=device), return_complex=True)
    parts = [torch.view_as_real(spectrum), torch.view_as_real(product), stft.abs(), product.imag]
    return [tensor for part in parts for tensor in graded(part, x)]


@case
def linear_algebra(device: torch.device) -> list[Tensor]:
    x = leaf(device, 3, 4, 4)
    positive = x @ x.mT + 4 * torch.eye(4, device=device)
    solved = torch.linalg.solve(positive, x)
    parts = [
        torch.linalg.cholesky(positive),
        solved,
        torch.linalg.det(positive),
        torch.linalg.svdvals(x),
    ]
    return [tensor for part in parts for tensor in graded(part, x)]


@case
def einsum(device: torch.device) -> list[Tensor]:
    a, b = leaf(device, 2, 3, 4), leaf(device, 2, 4, 5)
    return graded(torch.einsum("bij,bjk->bki", a, b), a, b) + graded(
        torch.tensordot(a[0], b[0], 1), a
    )


@case
def interpolate(device: torch.device) -> list[Tensor]:
    x = leaf(device, 2, 3, 5, 5)
    found = []
    for mode in ("nearest", "bilinear", "bicubic", "area"):
        found += graded(F.interpolate(x, size=(8, 7), mode=mode), x)
    grid = F.affine_grid(
        torch.eye(2, 3).repeat(2, 1, 1).to(device), [2, 3, 4, 4], align_corners=False
    )
    return found + graded(F.grid_sample(x, grid, align_corners=False), x)


@case
def pooling(device: torch.device) -> list[Tensor]:
    x = leaf(device, 2, 3, 8, 8)
    pooled, where = F.max_pool2d(x, 2, return_indices=True)
    found = [where, *graded(pooled, x), *graded(F.max_unpool2d(pooled, where, 2), x)]
    for output in (F.avg_pool2d(x, 3, 2, 1), F.adaptive_max_pool2d(x, 3), F.lp_pool2d(x, 2, 2)):
        found += graded(output, x)
    return found + graded(F.pad(x, (1, 2, 0, 1), mode="reflect"), x) + graded(F.unfold(x, 3), x)


@case
def losses(device: torch.device) -> list[Tensor]:
    x, y = leaf(device, 6, 5), torch.randint(0, 5, (6,)).to(device)
    target = torch.rand(6, 5).to(device)
    found = [
        F.cross_entropy(x, y, label_smoothing=0.1, weight=torch.arange(1.0, 6).to(device)),
        F.nll_loss(x.log_softmax(1), y, ignore_index=2),
        F.mse_loss(x, target),
        F.smooth_l1_loss(x, target),
        F.binary_cross_entropy_with_logits(x, target),
        F.binary_cross_entropy(x.sigmoid(), target),
        F.kl_div(x.log_softmax(1), target, reduction="batchmean"),
        F.huber_loss(x, target),
        F.triplet_margin_loss(x[:2], x[2:4], x[4:]),
        F.multi_margin_loss(x, y),
        F.poisson_nll_loss(x, target),
        F.cosine_embedding_loss(x[:3], x[3:], torch.ones(3, device=device)),
        F.gaussian_nll_loss(x, target, target),
    ]
    return [tensor for loss in found for tensor in graded(loss, x)]


@case
def ctc_loss(device: torch.device) -> list[Tensor]:
    x, targets = leaf(device, 12, 2, 5), torch.randint(1, 5, (2, 4)).to(device)
    lengths = torch.tensor([12, 10]), torch.tensor([4, 3])
    return graded(F.ctc_loss(x.log_softmax(2), targets, *lengths), x)


@case
def activations(device: torch.device) -> list[Tensor]:
    x = leaf(device, 4, 6)
    names = "relu gelu silu mish elu selu celu softplus hardtanh hardswish logsigmoid softsign"
    found = [getattr(F, name)(x) for name in names.split()] + [
        F.glu(x),
        F.softmax(x, 1),
        F.normalize(x),
    ]
    return [tensor for output in found for tensor in graded(output, x)]


@case
def reductions(device: torch.device) -> list[Tensor]:
    x = leaf(device, 4, 6)
    found = [
        x.sum(),
        x.mean(1),
        x.std(0),
        x.var(),
        x.norm(),
        x.prod(1),
        x.logsumexp(1),
        x.cumsum(1),
        x.amax(0),
    ]
    found += [
        x.max(1).values,
        x.quantile(0.3),
        torch.trapezoid(x),
        x.cumprod(0),
        x.clamp(-1, 1).abs().sum(),
    ]
    counts = [x.round().count_nonzero(), (x > 0).any(1), torch.bincount(x.abs().long().flatten())]
    return [tensor for output in found for tensor in graded(output, x)] + counts + [torch.histc(x)]


@case
def integers_and_types(device: torch.device) -> list[Tensor]:
    x = torch.randint(-9, 9, (5, 4)).to(device)
    half = x.bfloat16() / 3
    found = [
        x // 3,
        x % 4,
        x ^ 5,
        x << 1,
        x.bool(),
        x.double() * 2,
        half,
        half.half(),
        x * 0.5,
        x.float() + 1,
    ]
    return [
        *found,
        torch.where(x > 0, x, 0),
        torch.tril(x),
        x.unique(),
        x.nonzero(),
        torch.arange(3, 9, device=device),
    ]


@case
def factories(device: torch.device) -> list[Tensor]:
    with device:
        found = [
            torch.ones(2),
            torch.full((2,), 3),
            torch.eye(3),
            torch.linspace(0, 1, 5),
            torch.tensor([[1.0]]),
        ]
        found += [
            torch.tril_indices(3, 3),
            torch.hann_window(6),
            torch.arange(5),
            torch.zeros(2, 2).new_ones(3),
        ]
        assert all(tensor.device == device for tensor in found)
        return found


def _optimizer(make: Callable[..., torch.optim.Optimizer], **options: object) -> Case:
    def run(device: torch.device) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = make(model.parameters(), **options)
        x = torch.randn(6, 5).to(device)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return list(model.parameters())

    return run


CASES |= {
    "sgd_foreach": _optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam_foreach": _optimizer(torch.optim.Adam, lr=0.1, amsgrad=True, foreach=True),
    "adamw_foreach": _optimizer(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw_fused": _optimizer(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw_default": _optimizer(torch.optim.AdamW, lr=0.1),
    "rmsprop": _optimizer(torch.optim.RMSprop, lr=0.01),
    "adagrad": _optimizer(torch.optim.Adagrad, lr=0.1),
}


@case
def lbfgs(device: torch.device) -> list[Tensor]:
    model, x = nn.Linear(4, 1).to(device), torch.randn(9, 4).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return list(model.parameters())


def _double_backward(make: Callable[[], nn.Module], *shape: int) -> Case:
    """The gradient of a gradient penalty."""

    def run(device: torch.device) -> list[Tensor]:
        module, x = make().to(device), leaf(device, *shape)
        output = tensors(module(x))[0]
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        slope.square().mean().backward()
        return [slope, *(p.grad for p in module.parameters() if p.grad is not None)]

    return run


CASES |= {
    "double_backward_mlp": _double_backward(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)), 3, 4
    ),
    "double_backward_cnn": _double_backward(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Softplus(), nn.AvgPool2d(2)
        ),
        3,
        2,
        8,
        8,
    ),
    "double_backward_lstm": _double_backward(lambda: nn.LSTM(3, 4), 4, 2, 3),
    "double_backward_gru": _double_backward(lambda: nn.GRU(3, 4), 4, 2, 3),
}


def _checkpointed(use_reentrant: bool) -> Case:
    def run(device: torch.device) -> list[Tensor]:
        body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(device)
        x = leaf(device, 6, 4)
        _seed(device, 3)
        output = checkpoint(body, x, use_reentrant=use_reentrant)
        return graded_by_backward(output, x, *body.parameters())

    return run


def graded_by_backward(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    output.square().sum().backward()
    return [output, *(tensor.grad for tensor in inputs if tensor.grad is not None)]


CASES |= {
    "checkpoint_reentrant": _checkpointed(True),
    "checkpoint_non_reentrant": _checkpointed(False),
}


@case
def functional_transforms(device: torch.device) -> list[Tensor]:
    weight, x = torch.randn(4, 3).to(device), torch.randn(5, 3).to(device)

    def loss(weight: Tensor, row: Tensor) -> Tensor:
        return (weight @ row).tanh().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    return [per_sample, torch.func.jacrev(loss)(weight, x[0])]


@case
def parametrizations(device: torch.device) -> list[Tensor]:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    return trained(nn.Sequential(normed, spectral).to(device), leaf(device, 5, 4))


@case
def flattened_parameters(device: torch.device) -> list[Tensor]:
    model = nn.Linear(4, 3).to(device)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return [vector, *model.parameters()]


@pytest.mark.parametrize("name", sorted(CASES))
def test_values_and_gradients_are_those_of_the_cpu(name: str) -> None:
    results = []
    for device in (torch.device("cpu"), torch.device("sim:3")):
        torch.manual_seed(0)
        results.append(CASES[name](device))
        assert all(result.device == device for result in results[-1])
    expected, got = results
    assert len(expected) == len(got) > 0
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-5, check_stride=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_ops_that_cuda_casts(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))
    device_model = copy.deepcopy(model).to("sim:3")
    x = torch.randn(2, 3, 6, 6)
    with torch.autocast("sim", dtype=dtype):
        features = device_model[0](x.to("sim:3"))
        output = device_model(x.to("sim:3"))
        assert features.dtype == output.dtype == dtype
        assert (output @ output.t()).dtype == dtype
        assert output.softmax(1).dtype == torch.float32  # in full precision, as on CUDA
        assert F.mse_loss(output, output.detach()).dtype == torch.float32
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(output.sigmoid(), torch.zeros_like(output))
    output.float().square().mean().backward()
    assert device_model[0].weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float().cpu(), model(x), rtol=0.05, atol=0.05)


def test_autocast_of_the_cpu_leaves_simulated_devices_alone() -> None:
    layer, x = nn.Linear(4, 3).to("sim:3"), torch.randn(2, 4, device="sim:3")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchmetrics.Accuracy(task="multiclass", num_classes=4),
        lambda: torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4),
        lambda: torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
        lambda: torchmetrics.AUROC(task="multiclass", num_classes=4),
        lambda: torchmetrics.AveragePrecision(task="multiclass", num_classes=4, thresholds=10),
        lambda: torchmetrics.MetricCollection(
            [
                torchmetrics.Precision("multiclass", num_classes=4),
                torchmetrics.Recall("multiclass", num_classes=4),
            ]
        ),
    ],
    ids=["accuracy", "confusion_matrix", "f1", "auroc", "average_precision", "collection"],
)
def test_torchmetrics_compute_the_cpus_values(
    make: Callable[[], torchmetrics.Metric | torchmetrics.MetricCollection],
) -> None:
    probabilities, labels = torch.randn(60, 4).softmax(1), torch.randint(0, 4, (60,))
    values = []
    for device in ("cpu", "sim:3"):
        metric = make().to(device)
        for part in (slice(0, 25), slice(25, 60)):
            metric.update(probabilities[part].to(device), labels[part].to(device))
        value = metric.compute()
        values.append(value if isinstance(value, dict) else {"": value})
    for name, value in values[0].items():
        assert values[1][name].device == torch.device("sim:3")
        torch.testing.assert_close(values[1][name].cpu(), value)


def test_regression_metrics_compute_the_cpus_values() -> None:
    x, y = torch.randn(30), torch.randn(30)
    for make in (torchmetrics.MeanSquaredError, torchmetrics.PearsonCorrCoef, torchmetrics.R2Score):
        value = make().to("sim:3")(x.to("sim:3"), y.to("sim:3"))
        torch.testing.assert_close(value.cpu(), make()(x, y))
