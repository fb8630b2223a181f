"""``python -m lightning_dp [VERB] ...``, also installed as ``lightning-dp``.

A first word without ``=`` is the verb; without one it is ``train``.
"""

import importlib
import re
import sys
from typing import Any

VERBS = {"train": "lightning_dp.app.train", "doctor": "lightning_dp.app.doctor"}
_WORD = re.compile(r"[\w-]+")  # no override, and no option of Hydra


def main() -> Any:
    """Entry point of the command line; returns the exit status, None for 0."""
    verb = "train"
    if len(sys.argv) > 1 and _WORD.fullmatch(sys.argv[1]) and not sys.argv[1].startswith("-"):
        # Programs read their own options; child processes of a training start as trainings.
        verb = sys.argv.pop(1)
    if verb not in VERBS:
        sys.exit(
            f"error: expected one of {', '.join(VERBS)}, or an option such as experiment=digits, "
            f"got {verb!r}."
        )
    return importlib.import_module(VERBS[verb]).main()


if __name__ == "__main__":
    sys.exit(main())
