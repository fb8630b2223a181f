"""``python -m lightning_dp [VERB] ...``, also installed as ``lightning-dp``.

A first word without ``=`` is the verb; without one it is ``train``.
"""

import difflib
import importlib
import re
import sys
from typing import Any

VERBS = {
    "train": (
        "lightning_dp.app.jobs:train_main",
        "train and test (the default); Hydra's overrides",
    ),
    "evaluate": (
        "lightning_dp.app.jobs:evaluate_main",
        "test what a training has left: run=FOLDER",
    ),
    "convert": ("lightning_dp.checkpointing.convert", "rename the weights in a checkpoint file"),
    "doctor": ("lightning_dp.doctor", "do this machine's devices give one device's numbers"),
    "env": ("lightning_dp.doctor:env", "versions and devices, to be pasted into a report"),
}
"""For each verb the module that runs it, with the function unless that is `main`, and its help."""

_WORD = re.compile(r"[\w-]+")  # no override, and no option of Hydra


def main() -> Any:
    """Entry point of the command line; returns the exit status, None for 0."""
    verb = "train"
    if sys.argv[1:] in (["--help"], ["-h"], ["help"]):
        print(_help())
        return 0
    if len(sys.argv) > 1 and _WORD.fullmatch(sys.argv[1]) and not sys.argv[1].startswith("-"):
        # Programs read their own options; child processes of a training start as trainings.
        verb = sys.argv.pop(1)
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, 1)
        print(
            f"error: expected one of {', '.join(VERBS)}, or an option such as experiment=digits, "
            f"got {verb!r}." + "".join(f" Did you mean {name!r}?" for name in near),
            file=sys.stderr,
        )
        return 2
    module, _, function = VERBS[verb][0].partition(":")
    return getattr(importlib.import_module(module), function or "main")()


def _help() -> str:
    lines = [f"  {verb:10}{text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            "usage: lightning-dp [VERB] ...   or   python -m lightning_dp [VERB] ...",
            "",
            *lines,
            "",
            "  lightning-dp experiment=digits trainer.devices=2   trains",
            "  lightning-dp VERB --help                           options of a verb",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
