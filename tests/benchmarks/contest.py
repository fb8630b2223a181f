"""A contest: contestants that live long and train in turns, each in processes of its own.

While one trains the others wait for a line on a pipe, so that they take neither time nor cores. A
round has a turn for each of them. What a busy machine does to times it does to all of a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, cast

from benchmarks.arithmetic import in_turns, steps_for
from benchmarks.job import Job

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent
SETTLE = 0.05
"""Seconds between turns: threads of OpenMP spin for some milliseconds before they sleep."""

OF_PROCESSES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


class ContestantError(Exception):
    """A contestant has ended, or does not answer."""


@dataclass(frozen=True)
class Entry:
    """Who takes part.

    Args:
        name: in tables.
        job: what it does.
        is_many: whether it is a process for each device.
        package: the folder that `lightning_dp` is imported from.
    """

    name: str
    job: Job
    is_many: bool = False
    package: Path = PACKAGE


@dataclass(frozen=True)
class Turn:
    """What a contestant did in a turn.

    Args:
        seconds: of a step.
        loss: of the last step; a mean where each process has its own.
        device_bytes: the peak of each device's memory; empty on the CPU, where nobody counts it.
        process_bytes: the peak of its processes' memory so far.
        idle_cpu_seconds: that it took before, while it waited for its turn.
        stages: seconds per step of each stage, if asked for.
        ends: on virtual time when the devices were through with each step.
    """

    seconds: float
    loss: float
    device_bytes: list[int]
    process_bytes: int
    idle_cpu_seconds: float
    stages: dict[str, float]
    ends: list[float] = field(default_factory=list)


@dataclass
class Turns:
    """What a contestant did in the whole contest.

    Attributes:
        seconds: of a step, in each round.
        steps: in each round.
        loss: after the warm-up, when everybody has trained as much.
        parameter_bytes: of the model.
        last: its last turn.
        idle_cpu_seconds: that it took while others were at their turns.
        failure: why it did not go on; "" if it did.
    """

    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    loss: float | None = None
    parameter_bytes: int = 0
    last: Turn | None = None
    idle_cpu_seconds: float = 0.0
    failure: str = ""

    def add(self, turn: Turn) -> None:
        """A turn counts."""
        self.seconds.append(turn.seconds)
        self.idle_cpu_seconds += turn.idle_cpu_seconds
        self.last = turn


class Contestant:
    """The processes of one who takes part. They begin to import what they need at once.

    Args:
        entry: who.
        patience: seconds after which no answer is a failure.
    """

    def __init__(self, entry: Entry, patience: float = 300.0) -> None:
        self.name, self.turns = entry.name, Turns()
        self._patience = patience
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        port = str(_free_port())
        ranks = range(_count(entry))
        self._processes = [self._start(entry, rank, port) for rank in ranks]
        self._answers: list[SimpleQueue[str | None]] = [SimpleQueue() for _ in self._processes]
        self._readers = [
            Thread(target=_read, args=[process.stdout, answers], daemon=True)
            for process, answers in zip(self._processes, self._answers, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _start(self, entry: Entry, rank: int, port: str) -> subprocess.Popen[bytes]:
        job = entry.job
        # Who has a share of the devices has a share of the cores.
        count = _count(entry)
        parts = job.devices if job.peer == "one share" else count
        threads = str(max(1, job.cores // parts))
        if job.virtual:
            threads = "1"  # what is computed on the host does not count
        path = os.pathsep.join([str(entry.package), str(TESTS), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if count > 1:
            values = (str(rank), str(count), str(rank), "0", "127.0.0.1", port)
            own |= dict(zip(OF_PROCESSES, values, strict=True))
        others = {key: value for key, value in os.environ.items() if key not in OF_PROCESSES}
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contestant", job.to_json()],
            env=others | own,
            cwd=entry.package,  # from where `-m` imports before it asks PYTHONPATH
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def wait_until_ready(self) -> None:
        """Until its first step can begin."""
        self.turns.parameter_bytes = self._next_answers()[0]["parameter_bytes"]

    def train(self, steps: int, **first: Any) -> Turn:
        """Trains for some steps.

        Args:
            steps: how many.
            **first: what only the first process is told, see `Pace`: two would write a timeline to
                one file.

        Raises:
            ContestantError: it could not.
        """
        for rank, process in enumerate(self._processes):
            command = {"steps": steps} | ({} if rank else first)
            line = (json.dumps(command) + "\n").encode()
            with contextlib.suppress(OSError):  # it has ended: the missing answer tells
                cast(IO[bytes], process.stdin).write(line)
                cast(IO[bytes], process.stdin).flush()
        answers = self._next_answers()
        return Turn(
            seconds=max(answer["seconds"] for answer in answers) / steps,
            loss=sum(answer["loss"] for answer in answers) / len(answers),
            device_bytes=[size for answer in answers for size in answer["device_bytes"]],
            process_bytes=sum(answer["process_bytes"] for answer in answers),
            idle_cpu_seconds=sum(answer["idle_cpu_seconds"] for answer in answers),
            stages={name: s / steps for name, s in answers[0]["stages"].items()},
            ends=answers[0]["ends"],
        )

    def _next_answers(self) -> list[dict[str, Any]]:
        end = time.monotonic() + self._patience
        texts = []
        for answers in self._answers:
            try:
                text = answers.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                raise ContestantError(f"no answer in {self._patience:.0f} s") from None
            if text is None:
                raise ContestantError(f"it ended: {self._last_words()}")
            texts.append(json.loads(text))
        return texts

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()

    def close(self, patience: float = 20.0) -> None:
        """Lets it end, and ends it if it does not."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                cast(IO[bytes], process.stdin).close()
        end = time.monotonic() + patience
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
        for process, reader in zip(self._processes, self._readers, strict=True):
            reader.join()
            cast(IO[bytes], process.stdout).close()
        self._said.close()


@dataclass(frozen=True)
class Rules:
    """How long and how often.

    Args:
        rounds: turns of each.
        warm_up: steps before, which no time is taken of: caches, graphs, and whatever ours tries.
        seconds: of a turn, about.
        steps: of a turn; None for as many as take so many seconds.
        traces: where timelines are written, by the contestants' names.
    """

    rounds: int = 7
    warm_up: int = 40
    seconds: float = 0.5
    steps: int | None = None
    traces: Mapping[str, str] = field(default_factory=dict)


def hold(
    entries: Sequence[Entry], rules: Rules, say: Callable[[str], None] = lambda text: None
) -> dict[str, Turns]:
    """Lets all train in turns; who fails is left out from then on.

    Args:
        entries: who takes part.
        rules: how long and how often.
        say: is told who fails.
    """
    contestants: list[Contestant] = []
    try:
        contestants += map(Contestant, entries)
        _hold(contestants, rules, say)
    finally:
        for contestant in contestants:
            contestant.close()
    return {contestant.name: contestant.turns for contestant in contestants}


def _hold(contestants: Sequence[Contestant], rules: Rules, say: Callable[[str], None]) -> None:
    there = {contestant.name: contestant for contestant in contestants}

    def each(work: Callable[[Contestant], None], names: Sequence[str]) -> None:
        for name in names:
            try:
                work(there[name])
            except ContestantError as error:
                say(f"{name} failed: {error}")
                there.pop(name).turns.failure = str(error)
            time.sleep(SETTLE)

    def warm_up(contestant: Contestant) -> None:
        contestant.turns.loss = contestant.train(rules.warm_up).loss
        usual = contestant.train(rules.steps or 2).seconds
        contestant.turns.steps = rules.steps or steps_for(rules.seconds, usual)

    def measure(contestant: Contestant) -> None:
        contestant.turns.add(contestant.train(contestant.turns.steps))

    def trace(contestant: Contestant) -> None:
        contestant.train(1, trace=rules.traces[contestant.name])

    each(Contestant.wait_until_ready, list(there))  # nobody trains before all are
    each(warm_up, list(there))
    for round_ in range(rules.rounds):
        each(measure, in_turns(list(there), round_))
    each(trace, [name for name in there if name in rules.traces])


def _count(entry: Entry) -> int:
    """Of its processes."""
    return entry.job.devices if entry.is_many else entry.job.processes


def _read(pipe: IO[bytes], answers: SimpleQueue[str | None]) -> None:
    for line in pipe:
        answers.put(line.decode())
    answers.put(None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
