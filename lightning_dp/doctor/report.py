"""The verbs ``doctor`` and ``env``: the environment, the laws, a table of step times, a verdict."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_dp import __version__
from lightning_dp.doctor import laws
from lightning_dp.doctor.laws import Devices, LawSkipped
from lightning_dp.parallel import devices as machine
from lightning_dp.table import OneLineParser

DESCRIPTION = """\
Proves on this machine's devices that a training on all of them gives the
numbers of one, and times a step. Takes about a minute. Without --devices it
takes all GPUs, or two replicas on the CPU, which say nothing about GPUs.
Exit status: 0 if healthy, 1 if not, 2 for unusable options.
"""
STEPS, ROUNDS = 8, 5  # of the step times
PACKAGES = ("lightning", "pytorch-lightning", "torchmetrics", "hydra-core", "numpy")
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"),
)
"""The variables that are shown; no path and no secret is in them."""


def environment() -> dict[str, str]:
    """Returns the facts that a bug report needs; no user name, path or host name is in it."""
    is_gil_enabled = getattr(sys, "_is_gil_enabled", lambda: True)
    facts = {
        **versions(),
        "GIL": "on" if is_gil_enabled() else "off (free-threaded Python)",
        "system": platform.platform(),
        "cpu": f"{machine.cores()} cores, {torch.get_num_threads()} threads",
    }
    if torch.cuda.is_available():
        facts["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    facts |= {str(d): _accelerator(d) for d in machine.all_devices() if d.type != "cpu"}
    return facts | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that a run depends on."""
    facts = {"python": platform.python_version(), "lightning-dp": __version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return {**facts, "torch": str(torch.__version__)}


def _accelerator(device: torch.device) -> str:
    module: Any = torch.get_device_module(device)
    properties: Any = getattr(module, "get_device_properties", lambda _: None)(device)
    name: str = getattr(properties, "name", device.type)
    if not machine.memory_capacity(device):
        return name
    free, total = (size / 2**30 for size in module.mem_get_info(device))
    return f"{name}, {total:.1f} GiB, {free:.1f} GiB free"


def print_facts(facts: Mapping[str, str]) -> None:
    """Prints facts, one per line."""
    for name, value in facts.items():
        print(f"{name:{max(map(len, facts)) + 2}}{value}")


def env(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``env``; returns the exit status."""
    parser = OneLineParser("python -m lightning_dp env", description="Facts for a bug report.")
    parser.parse_args(arguments)
    print_facts(environment())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``doctor``; returns the exit status."""
    parser = OneLineParser(
        "python -m lightning_dp doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", metavar="WHICH", help="a number such as 4, or cuda:0,cuda:1")
    options = parser.parse_args(arguments)
    try:
        devices = devices_named(options.devices)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    logging.disable(logging.CRITICAL)  # a law that provokes an error is no news
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return 0 if examine(devices) else 1
    finally:
        logging.disable(logging.NOTSET)


def devices_named(text: str | None) -> list[torch.device]:
    """Returns the devices that ``--devices`` names, at least two."""
    everyone = machine.all_devices()
    if text is None or text.isdigit():
        count = max(2, len(everyone)) if text is None else int(text)
        devices = [everyone[k % len(everyone)] for k in range(count)]
    else:
        devices = machine.resolve_devices(text.replace(" ", "").split(","), "--devices")
    if len(devices) < 2:
        two = f"{everyone[0]},{everyone[0]}"
        raise ValueError(f"--devices: expected at least 2 devices, got {text!r}. Write 2 or {two}.")
    return devices


def examine(devices: Devices) -> bool:
    """Prints the report; returns whether the devices are healthy."""
    names, found = machine.replica_names(devices), list[str]()
    print_facts(environment())
    print(f"\nlaws on {', '.join(names)}")
    if {device.type for device in devices} == {"cpu"}:
        print("(replicas that share the CPU: this says nothing about GPUs)")
    for name, law in laws.LAWS.items():
        print(f"  {name:23}", end="", flush=True)
        try:
            verdict, remark = "holds", str(law(devices))
        except LawSkipped as reason:
            verdict, remark = "skipped", str(reason)
        except Exception as error:  # whatever it is, the law does not hold
            said = [f"{type(error).__name__}:", str(error), *getattr(error, "__notes__", ())]
            verdict, remark = "FAILS", " ".join(said).removeprefix("AssertionError: ")
        found.append(verdict)
        print(f"{verdict:9}{' '.join(remark.split())}")
    healthy = "FAILS" not in found and "holds" in found
    timing = time_steps(devices) if healthy else {}
    for way, ms in timing.items():
        print(f"{way:12}{ms:9.1f} ms per step   ratio {ms / timing['one device']:.2f}")
    verdict = "Healthy" if healthy else "NOT HEALTHY"
    print(f"{verdict}: {found.count('holds')} of {len(found)} laws hold on {', '.join(names)}.")
    return healthy


def time_steps(devices: Devices) -> dict[str, float]:
    """Returns the milliseconds of a step on one device and on all: medians of rounds in turns."""
    batch = laws.make_batch(512 * len(devices), torch.float32, 0)
    alone, net = (laws.make_net(devices, torch.float32) for _ in range(2))

    def ms(net: laws.Net, loss_of: Any) -> float:
        start = time.perf_counter()
        laws.train(net, [batch] * STEPS, loss_of)
        return 1e3 * (time.perf_counter() - start) / STEPS

    with closing(laws.SplitNet(net, devices, how="auto")) as engine:
        rounds = [(ms(alone, None), ms(net, engine.training_step)) for _ in range(ROUNDS)]
    medians = map(statistics.median, zip(*rounds[1:], strict=True))  # the first one warms up
    return dict(zip(("one device", f"{len(devices)} devices"), medians, strict=True))
