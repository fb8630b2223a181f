"""The pace of a contestant: it trains so many steps when it is told to, and waits in between.

It waits for a line on a pipe, so that one that is not at its turn takes no time from the others.
A turn's time is that from the line's arrival until the devices are through with the last step.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from benchmarks.job import Job
from torch import Tensor


class Pace:
    """Tells a training how many steps to go on, and somebody else how long they took.

    Args:
        job: what is trained.
        commands: a line for each turn, such as `{"steps": 10}`; with `"trace": "FILE"` the turn's
            timeline is written there. On virtual time `"links"` and `"speed"` are those of the
            simulated devices from then on. Their end is the training's.
        answers: get a line when the training is ready, and one for each turn.
    """

    def __init__(self, job: Job, commands: IO[str], answers: IO[str]) -> None:
        self._job = job
        self._commands, self._answers = commands, answers
        self._devices: Sequence[torch.device] = ()
        self._steps = self._left = 0
        self._start = self._idle_cpu = 0.0
        self._trace = ""
        self._ends: list[float] = []
        self._profiler: Any = None
        self.stages: dict[str, float] = {}  # seconds by name, if somebody fills them

    def begin(self, devices: Sequence[torch.device], **facts: Any) -> bool:
        """The first step can begin; whether there is to be one."""
        self._devices = list(dict.fromkeys(d for d in devices if d.type != "cpu"))
        self._answer({"ready": True, **facts})
        return self._next()

    def step_done(self, loss: Any) -> bool:
        """A step was handed to the devices, with this loss; whether there is to be another one."""
        self._left -= 1
        if self._job.virtual:
            self._ends.append(torch.sim.elapsed())
        if self._left:
            return True
        self._synchronize()
        seconds = time.perf_counter() - self._start
        if self._job.virtual:
            seconds = torch.sim.elapsed()
        if self._trace:
            self._end_trace()
        if self._job.virtual:
            torch.sim.set_clock("wall")
        self._answer(
            {
                "seconds": seconds,
                "steps": self._steps,
                "loss": _number(loss),
                "device_bytes": [_module(d).max_memory_allocated(d) for d in self._devices],
                "process_bytes": _largest_size(),
                "idle_cpu_seconds": self._idle_cpu,
                "stages": dict(self.stages),
                "ends": self._ends,
            }
        )
        return self._next()

    def _next(self) -> bool:
        """Waits for the next turn; False if there is none."""
        before = time.process_time()
        line = self._commands.readline()
        self._idle_cpu = time.process_time() - before
        if not line:
            return False
        command = json.loads(line)
        self._steps = self._left = command["steps"]
        self._trace = command.get("trace", "")
        self.stages.clear()
        self._ends = []
        self._set_machine(command)
        for device in self._devices:
            _module(device).reset_peak_memory_stats(device)
        self._begin_trace()
        if self._job.virtual:
            torch.sim.set_clock("virtual")
        self._start = time.perf_counter()
        return True

    def _set_machine(self, command: dict[str, Any]) -> None:
        if "links" in command:
            torch.sim.set_links(command["links"])
        if "speed" in command:
            for device in self._devices:
                torch.sim.set_speed(device, **command["speed"])

    def _begin_trace(self) -> None:
        if self._trace and not self._job.virtual:
            self._profiler = torch.profiler.profile()
            self._profiler.__enter__()

    def _end_trace(self) -> None:
        Path(self._trace).parent.mkdir(parents=True, exist_ok=True)
        if self._job.virtual:
            torch.sim.save_timeline(self._trace)
            torch.sim.draw_timeline(Path(self._trace).with_suffix(".png"))
        else:
            self._profiler.__exit__(None, None, None)
            self._profiler.export_chrome_trace(self._trace)

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def _answer(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # who has asked is gone, and so are commands
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()


def _number(loss: Any) -> float:
    """A loss as a number; of several devices' own losses the mean."""
    if isinstance(loss, list):
        return sum(map(_number, loss)) / len(loss)
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _largest_size() -> int:
    """The most memory that this process has had."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024)
