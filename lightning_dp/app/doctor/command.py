"""Is all well on this machine? ``python -m lightning_dp doctor``."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_dp.app.devices import cpu_replicas
from lightning_dp.app.doctor.own_workload import own_workloads
from lightning_dp.app.run import INTERRUPTED
from lightning_dp.doctor import (
    COMPILED,
    LAWS,
    OWN_TWO,
    Law,
    Plan,
    Workload,
    examine,
    seconds_of_process,
)
from lightning_dp.parallel.devices import all_devices, device_count, resolve_devices
from lightning_dp.table import ScreenParser

DESCRIPTION = """\
Looks at this machine's devices: what they are, whether training on all of them
gives the numbers of one, and what is the fastest way to use them. In under a
minute, without any download. A machine that is too slow or too busy for that
times less, and says what.

  lightning-dp doctor                            all GPUs, or CPU replicas
  lightning-dp doctor --devices cpu:4            so many of a kind
  lightning-dp doctor --devices cuda:0,cuda:0    these; one may repeat
  lightning-dp doctor experiment=digits          times this, not our own nets
  lightning-dp doctor --module package.Class --data package.DataModule

Exit status: 0 if all laws hold that could be looked at, 1 if not, 2 for
unusable options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    try:
        devices = devices_named(options.devices)
        # Who calls this with arguments of its own has not started the process for it.
        before = seconds_of_process() if arguments is None else 0.0
        plan = _plan(options, devices, _own_arguments(options), before)
    except (ValueError, ImportError, RuntimeError) as error:
        parser.exit(2, f"error: {error}\n")
    try:
        return 0 if examine(plan).is_healthy else 1
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning makes an exit of it.
        if not any(isinstance(e, KeyboardInterrupt) for e in (stop, stop.__context__)):
            raise
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> ArgumentParser:
    parser = ScreenParser(
        "python -m lightning_dp doctor",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--devices",
        metavar="WHICH",
        help="KIND or KIND:COUNT (cuda, cpu:4, sim:8), or a list of devices (cuda:0,cuda:0)",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("doctor.json"))
    parser.add_argument(
        "--only", metavar="WORDS", action="append", help="laws with these words in their name"
    )
    parser.add_argument("--no-advice", action="store_true", help="time nothing")
    add_own_options(parser)
    return parser


def add_own_options(parser: ArgumentParser) -> None:
    """The options that name the user's own module."""
    parser.add_argument(
        "--module", metavar="PACKAGE.CLASS", help="a LightningModule that is made without arguments"
    )
    parser.add_argument(
        "--data",
        metavar="PACKAGE.CLASS",
        help="its LightningDataModule, unless it has a train_dataloader itself",
    )
    parser.add_argument("overrides", nargs="*", metavar="experiment=NAME KEY=VALUE")


def _own_arguments(options: Namespace) -> list[str]:
    """The part of the command line that names the user's own module, for other processes."""
    named = (("--module", options.module), ("--data", options.data))
    flags = [part for flag, value in named if value is not None for part in (flag, value)]
    return [*flags, *options.overrides]


def _plan(
    options: Namespace, devices: Sequence[torch.device], own: list[str], seconds_before: float
) -> Plan:
    program = [sys.executable, "-m", "lightning_dp"]
    names = ["--devices", ",".join([*map(str, devices), ""])]
    laws = _laws(options.only)
    workloads: Sequence[Workload] = ()
    untimed = "--no-advice" if options.no_advice else "--only" if options.only else None
    if untimed is None:
        workloads = own_workloads(options.module, options.data, options.overrides) or OWN_TWO
    elif own:
        raise ValueError(
            f"{untimed}: expected nothing of your own beside it, since nothing is timed, got "
            f"{' '.join(own)}. Leave one of them out."
        )
    return Plan(
        devices,
        laws,
        workloads,
        command=[] if options.only else [*program, "doctor", *names, "--no-advice"],
        ddp_command=[sys.executable, "-m", "lightning_dp.app.doctor.process", *names, *own],
        output=options.output,
        seconds_before=seconds_before,
    )


def _laws(words: Sequence[str] | None) -> list[Law]:
    if not words:
        return list(LAWS)
    chosen = [law for law in (*LAWS, COMPILED) if any(word in law.name for word in words)]
    if not chosen:
        names = ", ".join(repr(law.name) for law in (*LAWS, COMPILED))
        raise ValueError(
            f"--only: expected words of a law's name, got {', '.join(map(repr, words))}. "
            f"There are {names}."
        )
    return chosen


def devices_named(text: str | None) -> list[torch.device]:
    """The devices that an option names.

    ``None``: all GPUs, or some replicas on the CPU. ``"cuda"``: all of a kind. ``"cuda:2"``: so
    many. ``"cuda:0,cuda:2"`` and ``"cuda:1,"``: these.
    """
    if text is None:
        devices = all_devices()
        return devices if devices[0].type != "cpu" else devices * cpu_replicas()
    if "," in text:
        names = [name.strip() for name in text.split(",") if name.strip()]
        _enable(names)
        return resolve_devices(names, "--devices")
    kind, colon, count = text.partition(":")
    if kind not in _KINDS:
        raise ValueError(
            f"--devices: expected one of {', '.join(_KINDS)}, with how many of them (cpu:4), or a "
            f"list of devices (cuda:0,cuda:0), got {text!r}. Write one of these."
        )
    if colon and not (count.isdigit() and int(count) > 0):
        raise ValueError(
            f"--devices: expected a number of devices after {kind!r}, at least 1, got {count!r}. "
            "Try cpu:4, or cuda for all of them."
        )
    if kind == "cpu":
        return [torch.device("cpu")] * int(count or cpu_replicas())
    if kind == "sim":
        _enable([f"sim:{int(count) - 1}" if count else "sim"])
    chosen = [f"{kind}:{i}" for i in range(int(count) if count else max(1, device_count(kind)))]
    return resolve_devices(chosen, "--devices")


_KINDS = ("cpu", "cuda", "mps", "xpu", "sim")


def _enable(names: Sequence[str]) -> None:
    """Makes simulated devices exist, if some are named: so many that these are among them."""
    ids = [name.partition(":")[2] for name in names if name.partition(":")[0] == "sim"]
    if not ids:
        return
    from lightning_dp import sim

    if not sim.is_enabled():
        highest = max((int(index) for index in ids if index.isdigit()), default=-1)
        sim.enable(highest + 1) if highest >= 0 else sim.enable()
