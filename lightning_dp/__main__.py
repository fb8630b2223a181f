"""``python -m lightning_dp [VERB] ...``, also installed as ``lightning-dp``.

A first word without ``=`` is the verb; without one it is ``train``.
"""

import importlib
import re
import sys
from typing import Any

VERBS = {
    "train": "lightning_dp.app.jobs:train_main",
    "evaluate": "lightning_dp.app.jobs:evaluate_main",
    "convert": "lightning_dp.checkpointing.convert:main",
    "doctor": "lightning_dp.doctor:main",
    "env": "lightning_dp.doctor:env",
}
"""For each verb the module and the function that runs it."""

HELP = """\
usage: lightning-dp [VERB] ...   or   python -m lightning_dp [VERB] ...

  train     train and test (the default); Hydra's overrides
  evaluate  test what a training has left: run=FOLDER
  convert   rename the weights in a checkpoint file
  doctor    do this machine's devices give one device's numbers
  env       versions and devices, to be pasted into a report

  lightning-dp experiment=digits trainer.devices=2   trains
  lightning-dp VERB --help                           options of a verb"""


def main() -> Any:
    """Entry point of the command line; returns the exit status, None for 0."""
    verb = "train"
    if sys.argv[1:] in (["--help"], ["-h"], ["help"]):
        print(HELP)
        return 0
    if len(sys.argv) > 1 and re.fullmatch(r"\w[\w-]*", sys.argv[1]):  # no override, no option
        # Programs read their own options; child processes of a training start as trainings.
        verb = sys.argv.pop(1)
    if verb not in VERBS:
        print(
            f"error: expected one of {', '.join(VERBS)}, or an option such as experiment=digits, "
            f"got {verb!r}.",
            file=sys.stderr,
        )
        return 2
    module, function = VERBS[verb].split(":")
    return getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    sys.exit(main())
