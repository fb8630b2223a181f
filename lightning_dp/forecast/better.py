"""Better: a step on 1 to 1,024 machines, which part of it binds where, and what would do better."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_dp.forecast.costs import Link
from lightning_dp.forecast.memory import Memory
from lightning_dp.forecast.step import Cluster, Job, Step, ddp, fsdp, ours
from lightning_dp.forecast.units import shown_bytes, shown_time

MACHINES = tuple(2**n for n in range(11))
CLEAR = 0.95
"""Of another time: what is less is told as faster."""

BOUND = 0.1
"""Of a step: if all that is no computing takes less than this, computing binds."""

WIDER = "Half as many machines with twice the devices each"
BUCKETS = tuple(2**n * 2**20 for n in (0, 2, 4, 6, 8))
LIMITS = {
    "shrinking": "computing that does not shrink with the share of the batch",
    "python": "what a process's devices take from each other (turns at the interpreter, say)",
    "local": "links between a machine's devices",
    "network": "sums between machines",
    "exchange": "messages after the forward",
    "waiting": "the slowest machine",
}


_PLURAL = ("local", "network", "exchange")


@dataclass(frozen=True)
class Setting:
    """What is asked.

    Args:
        job: what a device does.
        machine: the one that it was measured on.
        memory: of a device; None if nobody asks.
        machines: numbers of them.
    """

    job: Job
    machine: Cluster
    memory: Memory | None = None
    machines: Sequence[int] = MACHINES

    def on(self, machines: int) -> Cluster:
        """So many of these machines."""
        return replace(self.machine, machines=machines)

    def ours(self, cluster: Cluster) -> Step:
        """Our step there."""
        return ours(self.job, cluster, self.machine)


@dataclass(frozen=True)
class Row:
    """A number of machines.

    Args:
        machines: how many.
        devices: of all of them.
        step: ours.
        efficiency: the part of what so many machines could do that they do, if one does all.
        losses: the seconds of `step` that are no computing which the machines share, by `LIMITS`.
        ddp: the same with a process per device.
        fsdp: the same with the model in pieces.
        wider: ours with as many devices in half as many machines; None for one machine.
    """

    machines: int
    devices: int
    step: Step
    efficiency: float
    losses: dict[str, float]
    ddp: Step
    fsdp: Step
    wider: Step | None

    def as_json(self) -> dict[str, Any]:
        """As it is in a file."""
        steps = {"step": self.step, "ddp": self.ddp, "fsdp": self.fsdp, "wider": self.wider}
        seconds = {f"{name}_seconds": s and s.seconds for name, s in steps.items()}
        return {**asdict(self), **seconds}

    @property
    def limit(self) -> str:
        """The name in `LIMITS` of what binds; "" for computing."""
        if sum(self.losses.values()) < BOUND * self.step.seconds:
            return ""
        return max(self.losses, key=self.losses.__getitem__)


def forecast(setting: Setting) -> list[Row]:
    """A row for each number of machines."""
    return [_row(setting, machines) for machines in setting.machines]


def _row(setting: Setting, machines: int) -> Row:
    job, one, cluster = setting.job, setting.ours(setting.on(1)), setting.on(machines)
    step = setting.ours(cluster)
    part = machines if job.strong else 1
    losses = {name: value for name, value in vars(step).items() if name != "compute"}
    return Row(
        machines=machines,
        devices=cluster.total,
        step=step,
        efficiency=min(1.0, one.seconds / (part * step.seconds)),
        losses={"shrinking": max(0.0, step.compute - one.compute / part), **losses},
        ddp=ddp(job, cluster, setting.machine),
        fsdp=fsdp(job, cluster, setting.machine),
        wider=setting.ours(cluster.wider) if machines > 1 else None,
    )


def advice(setting: Setting, rows: Sequence[Row]) -> list[str]:
    """What binds where and what would do better, one thought a line."""
    return [
        *_limits(rows),
        *_efficiency(rows),
        *_network(setting, rows[-1]),
        *_others("DDP, a process per device,", rows, lambda row: row.ddp),
        *_others("FSDP, the model in pieces,", rows, lambda row: row.fsdp),
        *_processes(setting, rows[0]),
        *_others(WIDER, rows, lambda row: row.wider, "in place of"),
        *_memory(setting, rows),
    ]


def _limits(rows: Sequence[Row]) -> Iterator[str]:
    for limit, group in itertools.groupby(rows, lambda row: row.limit):
        own = list(group)
        if not limit:
            shares = [row.step.compute / row.step.seconds for row in own]
            yield f"{_where(own)}: computing binds, {_span(shares, '.0%')} of a step."
            continue
        times = [row.losses[limit] for row in own]
        shares = [row.losses[limit] / row.step.seconds for row in own]
        yield (
            f"{_where(own)}: {LIMITS[limit]} bind{'' if limit in _PLURAL else 's'}, "
            f"{_times(times)} of a step ({_span(shares, '.0%')})."
        )


def _efficiency(rows: Sequence[Row]) -> Iterator[str]:
    told = [
        f"at least {least:.0%} up to {_where(enough[-1:])}"
        for least in (0.9, 0.5)
        if (enough := _as_efficient(rows, least))
    ]
    yield f"Efficiency: {', '.join(told) or 'less than 50% everywhere'}."
    best = min(rows, key=lambda row: row.step.seconds)
    if best.machines < rows[-1].machines and best.step.seconds < rows[0].step.seconds:
        yield (
            f"A step is shortest on {_where([best])}, {_ms(best.step)}; more of them make it "
            "longer."
        )


def _as_efficient(rows: Sequence[Row], least: float) -> list[Row]:
    """The rows up to the first one that is less efficient."""
    return list(itertools.takewhile(lambda row: row.efficiency >= least, rows))


def _network(setting: Setting, row: Row) -> Iterator[str]:
    """What a change of what is between the machines would bring where most of them are."""
    between = row.step.network + row.step.exchange
    if between < BOUND * row.step.seconds or row.machines == 1:
        return
    cluster = setting.on(row.machines)
    link = cluster.network
    changes: dict[str, dict[str, Any]] = {
        "twice the bandwidth": {"network": Link(2 * link.bytes_per_second, link.seconds)},
        "half the latency": {"network": Link(link.bytes_per_second, link.seconds / 2)},
        "gathering by a tree": {"gathers": "tree"},
        "no message after the forward": {"exchanges": 0},
        **{f"buckets of {shown_bytes(size)}": {"bucket": size} for size in BUCKETS},
    }
    seconds = {name: setting.ours(replace(cluster, **c)).seconds for name, c in changes.items()}
    bucket = min((name for name in seconds if "buckets" in name), key=seconds.__getitem__)
    told = [
        f"{name} {shown_time(s)}"
        for name, s in seconds.items()
        if s < CLEAR * row.step.seconds and ("buckets" not in name or name == bucket)
    ]
    if told:
        yield f"On {row.machines:,} machines, instead of {_ms(row.step)}: {', '.join(told)}."


def _processes(setting: Setting, one: Row) -> Iterator[str]:
    """Whether two processes on a machine would do better there than one."""
    cluster = setting.machine
    if cluster.devices % 2 or one.machines > 1 or not setting.job.python:
        return
    halves = replace(cluster, machines=2, devices=cluster.devices // 2, network=cluster.local)
    # Both have a half of the machine's batch, as its devices have with one process.
    step = ours(replace(setting.job, strong=False), halves, cluster)
    if step.seconds < CLEAR * one.step.seconds:
        yield (
            f"Two processes on a machine, with half of its devices each, would be faster: on one "
            f"machine {_ms(step)}, not {_ms(one.step)}."
        )


def _others(
    name: str, rows: Sequence[Row], step: Callable[[Row], Step | None], preposition: str = "on"
) -> Iterator[str]:
    """Where another way is faster, and by how much."""
    known = [(row, other) for row in rows if (other := step(row)) is not None]
    ratios = {row.machines: other.seconds / row.step.seconds for row, other in known}
    better = [(row, other) for row, other in known if ratios[row.machines] < CLEAR]
    if not better:
        yield f"{name} would not be faster by {1 - CLEAR:.0%} anywhere."
        return
    best, there = min(better, key=lambda pair: ratios[pair[0].machines])
    yield (
        f"{name} would be faster {preposition} {_where([row for row, _ in better])}: "
        f"{_span([ratios[row.machines] for row, _ in better], '.2f')} of our time "
        f"({best.machines:,}: {_ms(there)}, not {_ms(best.step)})."
    )


def _memory(setting: Setting, rows: Sequence[Row]) -> Iterator[str]:
    memory = setting.memory
    if memory is None:
        return
    pieces = {row.machines: memory.fsdp(row.devices) for row in rows}
    text = f"Memory of a device: the root {shown_bytes(memory.ours)}"
    if setting.machine.devices > 1:
        text += f", the others of a process {shown_bytes(memory.replica)}"
    text += f"; with DDP {shown_bytes(memory.ddp)}; with FSDP {_sizes(list(pieces.values()))}"
    if memory.capacity is None:
        yield f"{text}."
        return
    yield f"{text}; there are {shown_bytes(memory.capacity)}."
    if memory.fits(memory.ours):
        yield _fsdp_needless(rows)
        return
    fitting = [row for row in rows if memory.fits(pieces[row.machines])]
    if not fitting:
        yield "Neither this nor DDP fits, nor does FSDP: take fewer samples, or cut the layers too."
        return
    first = fitting[0]
    yield (
        f"Neither this nor DDP fits. FSDP does from {_where([first])} on, which have "
        f"{first.devices:,} devices: {_ms(first.fsdp)} per step."
    )


def _fsdp_needless(rows: Sequence[Row]) -> str:
    ratios = [row.fsdp.seconds / row.step.seconds for row in rows]
    return f"All of it fits: FSDP, of {_span(ratios, '.2f')} of our time, is for larger models."


def _where(rows: Sequence[Row]) -> str:
    first, last = rows[0].machines, rows[-1].machines
    if first == last:
        return f"{first:,} machine" + "s" * (first > 1)
    return f"{first:,} to {last:,} machines"


def _span(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    if low == high:
        return low
    return f"{low.rstrip('%')} to {high}"


def _times(values: Sequence[float]) -> str:
    low, high = shown_time(min(values)), shown_time(max(values))
    return low if low == high else f"{low} to {high}"


def _sizes(values: Sequence[float]) -> str:
    low, high = shown_bytes(min(values)), shown_bytes(max(values))
    return low if low == high else f"{high} to {low}"


def _ms(step: Step) -> str:
    return shown_time(step.seconds)
