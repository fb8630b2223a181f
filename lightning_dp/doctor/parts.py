"""Laws about single devices and links: what is wrong there is named by the look itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.doctor.bench import Bench, as_vector, has_float64, pinned, relative, synchronize
from lightning_dp.doctor.law import Finding, SkippedLaw, worst
from lightning_dp.doctor.subjects import Classifier
from lightning_dp.parallel.devices import replica_names
from lightning_dp.parallel.links import to_device_coalesced
from lightning_dp.parallel.primitives import gather, parallel_apply, replicate, scatter

HOST = torch.device("cpu")
ELEMENTS = 20_011  # of a message; no multiple of anything


# --- links ---------------------------------------------------------------------------------------


def links_carry_what_was_sent(bench: Bench) -> Finding:
    """Every link, in both directions and by every kind of copy, brings each element unchanged."""
    ends = list(dict.fromkeys([HOST, *bench.distinct]))
    if len(ends) == 1:
        raise SkippedLaw("all replicas are on the CPU: nothing travels")
    # Made where it is: what a link does to it, is not done to what it is compared with.
    messages = {end: _message(end) for end in ends}
    off = {
        f"{source} -> {target}": worst(
            _share_wrong(send(messages[source], target), messages[target]) for send in _SENDS
        )
        for source in ends
        for target in ends
        if source != target
    }
    return _of_parts(off, 0.0, f"{len(off)} links, each by {len(_SENDS)} kinds of copy")


def _message(device: torch.device) -> Tensor:
    return torch.arange(ELEMENTS, device=device) * 2_654_435_761 % 2**31


def _share_wrong(arrived: Tensor, expected: Tensor) -> float:
    return float((arrived != expected).sum()) / ELEMENTS


def _copied(message: Tensor, target: torch.device) -> Tensor:
    return message.to(target)


def _copied_without_waiting(message: Tensor, target: torch.device) -> Tensor:
    """To and from pinned memory, where there is some: the copy is under way when the call ends."""
    if message.device.type == "cpu":
        message = pinned(message)
    arrived = message.to(target, non_blocking=True)
    # The host reads the one end, or lets go of the other.
    synchronize([message.device, target])
    return arrived


def _packed(message: Tensor, target: torch.device) -> Tensor:
    """As gradients and weights travel: several in one copy."""
    parts = torch.split(message, ELEMENTS // 7)
    return torch.cat(to_device_coalesced(list(parts), target))


_SENDS: Sequence[Callable[[Tensor, torch.device], Tensor]] = (
    _copied,
    _copied_without_waiting,
    _packed,
)


# --- devices -------------------------------------------------------------------------------------


class _Work(nn.Module):
    """A few operations of every kind, and their gradient."""

    def forward(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        wave = partial(_wave, device=device, dtype=dtype)
        a, b = wave(48, 64, 0.7).requires_grad_(), wave(64, 32, 1.3).requires_grad_()
        image = wave(2 * 3, 16 * 16, 0.3).view(2, 3, 16, 16)
        kernel = wave(4, 3 * 9, 1.1).view(4, 3, 3, 3).requires_grad_()
        product = a @ b
        attention = F.softmax(product @ product.T / 4, dim=1) @ product
        maps = F.conv2d(image, kernel, padding=1).relu()
        normed = F.layer_norm(attention, attention.shape[1:])
        total = normed.square().mean() + maps.square().mean() + product.cumsum(0).mean()
        with torch.enable_grad():
            gradients = torch.autograd.grad(total, [a, b, kernel])
        order = product.detach().sort(dim=1).values
        return [product.detach(), normed.detach(), maps.detach(), order, *gradients]


def _wave(rows: int, columns: int, step: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    steps = torch.arange(rows * columns, device=device).to(dtype)
    return (steps * step).sin().view(rows, columns)


def devices_compute_as_the_cpu_does(bench: Bench) -> Finding:
    """All replicas' devices at once, each against the CPU alone."""
    dtype = torch.float64 if all(map(has_float64, bench.distinct)) else torch.float32
    expected = as_vector(_Work()(HOST, dtype))
    calls = [(device, dtype) for device in bench.devices]
    outputs = parallel_apply([_Work() for _ in calls], calls, devices=bench.devices)
    off = {
        _who(bench, k): relative(as_vector(output), expected) for k, output in enumerate(outputs)
    }
    allowed = 1e-10 if dtype == torch.float64 else 1e-3  # some compute in TF32
    kind = str(dtype).removeprefix("torch.")
    return _of_parts(off, allowed, f"{kind}, forward and backward, all at once")


def gather_undoes_scatter(bench: Bench) -> Finding:
    """Whatever the number of samples, every shard is what it should be, and so are all together."""
    off: dict[str, float] = {}
    for n in (1, len(bench.devices), 5 * len(bench.devices) + 3):
        batch = _batch_of(n)
        shards = scatter(batch, bench.devices)
        joined = gather([shard for shard in shards if shard is not None], bench.root)
        end = 0
        for k, shard in enumerate(shards):
            begin, end = end, end + (0 if shard is None else len(shard["x"]))
            way = f"{bench.devices[k]} -> {bench.root}"
            for name in shard or ():
                expected = batch[name][begin:end]
                for who, part in ((_who(bench, k), shard[name]), (way, joined[name][begin:end])):
                    is_wrong = not torch.equal(part.cpu(), expected)
                    off[who] = max(off.get(who, 0.0), float(is_wrong))
        if end != len(joined["x"]):
            raise RuntimeError(f"Expected {n} samples to be gathered, got {len(joined['x'])}.")
    return _of_parts(off, 0.0, "exactly; of 1 sample and of many")


def _batch_of(n: int) -> dict[str, Tensor]:
    count = torch.arange(n * 6).view(n, 6)
    return {
        "x": (count * 0.37).sin(),
        "labels": count[:, 0],
        "mask": count % 3 == 0,
        "strided": count.float().t().contiguous().t(),
    }


def replicas_have_the_roots_weights(bench: Bench) -> Finding:
    """A module on every device has the very weights of the one on the root."""
    module = Classifier().to(bench.root)
    expected = as_vector(list(module.parameters()))
    replicas = replicate(module, bench.devices, detach=True)
    off = {
        _who(bench, k): relative(as_vector(list(replica.parameters())), expected)
        for k, replica in enumerate(replicas)
    }
    return _of_parts(off, 0.0, "exactly")


# --- both ----------------------------------------------------------------------------------------


def _who(bench: Bench, k: int) -> str:
    """A replica's name."""
    return replica_names(bench.devices)[k]


def _of_parts(off: Mapping[str, float], allowed: float, remark: str) -> Finding:
    """What was found, with those named that are off."""
    culprits = tuple(name for name, difference in off.items() if not difference <= allowed)
    return Finding(worst(off.values()), allowed, culprits, remark)
