"""What may be wrong with code that works on one device and fails on a replica."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dp.parallel.errors import described


def likely_cause(sizes: Sequence[int], error: BaseException) -> str:
    """How the note continues after the samples in "in replica 2 on cuda:1, ..."; may be "".

    Torch's message about tensors on two devices does not say that it comes from the split.

    Args:
        sizes: how many samples each replica had.
        error: a replica's error.
    """
    if sum(map(bool, sizes)) < 2 or "same device" not in described(error, str):
        return ""
    return (
        "; likely cause: replicas share objects that are no modules, with the tensors in them. "
        "Keep such a tensor by register_buffer on an nn.Module, or move it where it is used"
    )
