"""How long it takes to rename the keys of a big state dict: `python tests/benchmarks/renaming.py`.

2 GiB of tensors that have been written to, under the names of modules that wrappers stand in at
several depths. Printed are the shortest, the middle and the longest of 21 calls (the longest is
the garbage collector's, if it happens to look at the whole process), and by how much the memory of
the process grew.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dp import normalize_state_dict

SHAPES: dict[str, Callable[[int], str]] = {
    "module. around all": lambda i: f"module.blocks.{i // 4}.layer{i % 4}.weight",
    "wrapped blocks": lambda i: f"net.blocks.{i // 4}._orig_mod.layer{i % 4}.weight",
    "and a child `module`": lambda i: f"module.blocks.{i // 2}.{'module.' * (i % 2)}weight",
}
"""The reference has the same names without `_orig_mod` and without the first `module`."""


def bare(key: str) -> str:
    return key.replace("_orig_mod.", "").replace("module.", "", 1)


def measure(state: dict[str, Tensor], reference: list[str]) -> tuple[list[float], int]:
    seconds: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(21):
        start = time.perf_counter()
        found = normalize_state_dict(state, reference)
        seconds.append(time.perf_counter() - start)
    if not set(found) <= set(reference):
        raise RuntimeError("not renamed as expected")
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--gib", type=float, default=2.0)
    options = parser.parse_args()
    size = int(options.gib * 2**30 / 4 / options.keys)
    tensors = [torch.zeros(size).add_(1) for _ in range(options.keys)]
    print(f"{options.keys} keys, {sum(t.nbytes for t in tensors) / 2**30:.1f} GiB")
    for name, key in SHAPES.items():
        keys = [key(i) for i in range(options.keys)]
        reference = [bare(key) for key in keys]
        for case, first in (("whole", 0), ("a part of it", 1)):
            state = dict(zip(keys[first:], tensors[first:], strict=True))
            seconds, grown = measure(state, reference)
            print(
                f"{name:24} {case:16} {min(seconds) * 1e3:6.1f} "
                f"{statistics.median(seconds) * 1e3:6.1f} {max(seconds) * 1e3:6.1f} ms, "
                f"memory +{grown / 1024:.1f} MiB"
            )


if __name__ == "__main__":
    main()
