"""Memory of simulated devices, its limits, and what is copied between them."""

from __future__ import annotations

from dataclasses import dataclass

from sim_devices import attached
from sim_devices.attached import DeviceLike, index_of


@dataclass(frozen=True)
class CopyStats:
    """Copies from one device to another: how many, and their bytes at the source."""

    count: int
    bytes: int


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes in use on ``device`` now: by tensors, not by kernels' scratch memory."""
    return int(attached.extension.memory_allocated(index_of(device)))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes in use on ``device`` since the start or ``reset_peak_memory_stats``."""
    return int(attached.extension.max_memory_allocated(index_of(device)))


def set_memory_limit(device: DeviceLike, limit: int | None) -> None:
    """Let ``device`` have ``limit`` bytes, after which it raises ``torch.OutOfMemoryError``.

    What is in use already stays. After the error the device works on.

    Args:
        device: the device.
        limit: bytes, at least 1; ``None`` takes the limit away.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1 byte or None for no limit, got {limit}.")
    attached.extension.set_memory_limit(index_of(device), limit or 0)


def empty_cache() -> None:
    """Do nothing: memory is given back when a tensor dies."""


def copy_stats() -> dict[tuple[str, str], CopyStats]:
    """Return the copies between devices since the start or ``reset_copy_stats``.

    Returns: For every pair (source, target) with copies, such as ``("cpu", "sim:0")`` or
        ``("sim:0", "sim:1")``, their count and bytes. Copies within a device are not counted.
    """
    return {pair: CopyStats(*counts) for pair, counts in attached.extension.copies().items()}


def reset_copy_stats() -> None:
    """Start counting copies from zero."""
    attached.extension.reset_copies()
