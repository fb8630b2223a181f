"""The options of ``python -m lightning_dp plan``."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from lightning_dp.forecast import ALL_REDUCES, GATHERS, OPTIMIZERS, Link, count, rate, seconds, size
from lightning_dp.sim.links import PRESETS
from lightning_dp.table import ScreenParser

T = TypeVar("T")

DESCRIPTION = """\
Says what a training step would take on 1 to 1,024 machines like one that was
measured or simulated, which part of it binds where, and where DDP, FSDP or more
devices in a machine would do better. Each machine has one process with all its
devices. Nothing is started on other machines.

  lightning-dp plan --step 100ms --parameters 25M --devices 8 --local nvlink4
  lightning-dp plan --from speed.json --model transformer   (a benchmark's file)
  lightning-dp plan --from doctor.json --model convnet --parameters 94k
  lightning-dp plan --measure experiment=digits --on cpu:4   (some steps, here)

Times have units (20us, 100ms), so have sizes (101MB, 24GiB) and rates: 25Gb are
bits per second, 3GB are bytes. Give rates that somebody has measured.
"""

IN_MEMORY = "memory"
HOST_MEMORY = Link(5e9, 1e-6)
"""Replicas on the CPU add up gradients where these are: the rate of one thread, as measured."""

LOCAL: Mapping[str, Link] = MappingProxyType(
    {IN_MEMORY: HOST_MEMORY}
    | {
        name: Link(found.peer.bytes_per_second, found.peer.seconds)
        if found.peer
        # Through the host's memory, in pieces: one way's rate, the seconds of both.
        else Link(found.host.bytes_per_second, 2 * found.host.seconds)
        for name, found in PRESETS.items()
    }
)
"""The links within a machine, by name: those of simulated devices, and the CPU's."""


def plan_parser() -> ScreenParser:
    """What reads them."""
    parser = ScreenParser(
        "python -m lightning_dp plan",
        description=DESCRIPTION,
    )
    _add_step(parser.add_argument_group("one machine's step").add_argument)
    _add_machines(parser.add_argument_group("machines").add_argument)
    _add_memory(parser.add_argument_group("memory of a device").add_argument)
    out = parser.add_argument_group("what comes of it").add_argument
    out("--json", metavar="FILE", type=Path, help="all numbers go there")
    out("--plot", metavar="FILE", type=Path, help="a picture, .png or .svg")
    return parser


def _add_step(add: Callable[..., Any]) -> None:
    time, number = typed(seconds), typed(count)
    add("--step", metavar="TIME", type=time, help="of one machine, with its batch")
    add("--from", dest="file", metavar="FILE", type=Path, help="of the benchmark, or the doctor")
    add("--model", metavar="NAME", help="of those in FILE")
    add("--measure", metavar="KEY=VALUE", nargs="+", help="experiment=NAME: takes steps here")
    add("--on", metavar="WHICH", help="devices to measure on, as the doctor has them: cpu:4")
    add("--share", metavar="TIME", type=time, help="one device alone, with its share of the batch")
    add("--parameters", metavar="N", type=number, help="how many are trained")
    add("--bytes", metavar="SIZE", type=typed(size), help="of their gradients; 4 for each")
    add("--backward-share", metavar="X", type=float, default=2 / 3, help="of computing; 2/3")
    add(
        "--scaling", choices=("weak", "strong"), default="weak", help="weak: each machine its batch"
    )
    add("--batch", metavar="N", type=int, help="samples of one machine's step")
    add("--fixed", metavar="TIME", type=time, default=0.0, help="that fewer samples do not shorten")
    add("--noise", metavar="TIME", type=time, default=0.0, help="a step's standard deviation")


def _add_machines(add: Callable[..., Any]) -> None:
    add("--devices", metavar="K", type=int, help="of a machine")
    add("--local", metavar="LINK", type=_link, help=f"{', '.join(LOCAL)}, or RATE,TIME")
    add("--network", metavar="RATE", type=typed(rate), default="25Gb", help="of a machine; 25Gb")
    add("--latency", metavar="TIME", type=typed(seconds), default="20us", help="of it; 20us")
    add("--reduce", choices=ALL_REDUCES, default="best", help="sums between machines; gloo: ring")
    add("--gather", choices=GATHERS, default="ring", help="what machines tell each other")
    add("--exchanges", metavar="N", type=int, default=1, help="after a forward; 1")
    add("--bucket", metavar="SIZE", type=typed(size), default="4MiB", help="of gradients; 4MiB")
    add("--no-overlap", action="store_true", help="gradients leave after the backward, as on CPUs")
    add("--machines", metavar="P", type=int, nargs="+", help="how many; 1, 2, 4 to 1,024")


def _add_memory(add: Callable[..., Any]) -> None:
    add("--capacity", metavar="SIZE", type=typed(size), help="what there is")
    add("--activations", metavar="SIZE", type=typed(size), default="0", help="of its share")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="for what it keeps")
    add("--layers", metavar="N", type=int, default=24, help="FSDP gathers one at a time; 24")


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The `type=` of an option, whose message argparse shows."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return parsed


def _link(text: str) -> Link:
    if text in LOCAL:
        return LOCAL[text]
    first, comma, second = text.partition(",")
    try:
        if not comma:
            raise ValueError(f"expected one of {', '.join(LOCAL)}, or 26GB,2us, got {text!r}")
        return Link(rate(first), seconds(second))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
