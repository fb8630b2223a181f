"""DDP's step times: in processes of their own, which are started early and wait for their turn."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lightning_dp.doctor.aside import end
from lightning_dp.doctor.timing import timed
from lightning_dp.doctor.workloads import Workload
from lightning_dp.parallel.primitives import scatter

_ANSWER = "doctor, step times of DDP: "


class NoDdpError(Exception):
    """Says why there are no step times of DDP."""


def why_no_ddp(devices: Sequence[torch.device]) -> str:
    """Why DDP cannot run on these devices; "" if it can."""
    kind = devices[0].type
    if len(devices) == 1:
        return "there is one device"
    if kind not in ("cpu", "cuda"):
        return f"DDP is a process for each device, and {kind} devices are in one process"
    if kind == "cuda" and len(set(devices)) < len(devices):
        return "DDP takes every GPU once"
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    return ""


def backend_for(device: torch.device) -> str:
    """The library that DDP's processes talk by."""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return "nccl" if device.type == "cuda" and has_nccl else "gloo"


def forks(devices: Sequence[torch.device]) -> bool:
    """Whether one process imports everything for all: what has begun with CUDA cannot fork."""
    return devices[0].type == "cpu" and hasattr(os, "fork")


class DdpProcesses:
    """A process for each device. They import what they need, and then wait.

    Args:
        command: the program that calls `answer`.
        devices: the devices.
    """

    def __init__(self, command: Sequence[str], devices: Sequence[torch.device]) -> None:
        self._reader: Thread | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        own = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(len(devices)),
            "NODE_RANK": "0",
            # As Lightning's own launcher: each has its share of the cores.
            "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // len(devices))),
        }
        self._processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **own, "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._said,
                start_new_session=True,
            )
            for rank in range(1 if forks(devices) else len(devices))
        ]

    def measure(self, tasks: Mapping[str, Mapping[str, int]], seconds: float) -> dict[str, float]:
        """The step times of workloads by their names, each with `samples` and `steps`.

        Raises:
            NoDdpError: it failed, or took longer than so many seconds.
        """
        line = (json.dumps(tasks) + "\n").encode()
        try:
            for process in self._processes:
                cast(IO[bytes], process.stdin).write(line)
                cast(IO[bytes], process.stdin).close()
        except OSError as error:
            raise NoDdpError(f"its processes ended: {self._last_words() or error}") from None
        # To end, which takes seconds, they are not waited for.
        answers: SimpleQueue[str | None] = SimpleQueue()
        self._reader = Thread(target=self._read, args=[answers], name="doctor-ddp", daemon=True)
        self._reader.start()
        try:
            text = answers.get(timeout=seconds)
        except Empty:
            raise NoDdpError(f"its processes took longer than {seconds:.0f} s") from None
        if text is None:
            raise NoDdpError(f"it failed: {self._last_words()}")
        times: dict[str, float] = json.loads(text)
        return times

    def _read(self, answers: SimpleQueue[str | None]) -> None:
        """Looks for the answer in what the first process prints, until it has ended."""
        for line in cast(IO[bytes], self._processes[0].stdout):
            text = line.decode(errors="replace")
            if text.startswith(_ANSWER):
                answers.put(text.removeprefix(_ANSWER))
        answers.put(None)

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()

    def close(self) -> None:
        """Ends them all, whatever they are doing."""
        for process in self._processes:
            end(process)
        if self._reader is not None:
            self._reader.join()  # there is no more to read
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was written reaches nobody
                        pipe.close()
        self._said.close()


def answer(workloads: Sequence[Workload], devices: Sequence[torch.device]) -> None:
    """Waits for what is to be measured, measures it, and prints it: in each of the processes."""
    line = sys.stdin.readline()
    if not line.strip():
        return  # who has started this does not need it any more
    if forks(devices):
        for rank in range(1, len(devices)):
            if os.fork() == 0:
                os.environ["LOCAL_RANK"] = str(rank)
                break
    times = _all_timed(workloads, devices, json.loads(line))
    if os.environ["LOCAL_RANK"] == "0":
        print(_ANSWER + json.dumps(times), flush=True)


def _all_timed(
    workloads: Sequence[Workload], devices: Sequence[torch.device], tasks: dict[str, dict[str, int]]
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            workload.name: _timed(workload, devices, Path(folder), **tasks[workload.name])
            for workload in workloads
            if workload.name in tasks
        }


def _timed(
    workload: Workload, devices: Sequence[torch.device], folder: Path, samples: int, steps: int
) -> float:
    """Each process has its share of every batch, so that a step is the one of a single device."""
    rank = int(os.environ["LOCAL_RANK"])
    whole = workload.batches(samples)
    shares = [scatter(batch, ["cpu"] * len(devices))[rank] for batch in whole]
    is_cpu = devices[0].type == "cpu"
    options: dict[str, Any] = {
        "devices": len(devices) if is_cpu else [device.index for device in devices],
        "plugins": [LightningEnvironment()],
        "use_distributed_sampler": False,
    }
    backend = backend_for(devices[0])
    strategy = DDPStrategy(process_group_backend=backend, timeout=timedelta(seconds=60))
    own = [devices[rank]]
    return timed(workload, shares, strategy, own, folder, steps=steps, **options)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
