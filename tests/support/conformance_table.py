"""The table of conformance: which kind of model under which option was as on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from string import ascii_lowercase
from textwrap import wrap
from typing import TypeAlias

Case: TypeAlias = tuple[str, str]
"""The option and the family."""
SIGNS = {frozenset({True, False}): "=", frozenset({True}): "c", frozenset({False}): "e"}
"""By whether it was on the CPU."""


def table(passed: Iterable[str], failed: Iterable[str]) -> Iterator[str]:
    """The lines of the table, one for each option, with a column for each family.

    Args:
        passed: the names of tests, such as "test_as_one_device[frozen-split-cost-sim]".
        failed: others.

    Example:
        >>> passed = ["t[frozen-weights-cpu]", "t[frozen-weights-sim]"]
        >>> print(*table(passed, failed=["t[graph-x-cpu]"]), sep="\\n")
        a frozen, b graph
        As on one device: = on the CPU and elsewhere, c on the CPU, e elsewhere; X is not, and .
        was not run.
                 a b
        weights  = .
        x        . X
    """
    kinds: dict[Case, set[bool]] = defaultdict(set)
    for name in passed:
        case, on = _case(name)
        kinds[case].add(on == "cpu")
    wrong = {_case(name)[0] for name in failed}
    options = list(dict.fromkeys(option for option, _ in (*kinds, *wrong)))
    families = list(dict.fromkeys(family for _, family in (*kinds, *wrong)))
    letters = ascii_lowercase[: len(families)]
    legend = ", ".join(f"{x} {family}" for x, family in zip(letters, families, strict=True))
    yield from wrap(legend, 90)
    yield "As on one device: = on the CPU and elsewhere, c on the CPU, e elsewhere; X is not, and ."
    yield "was not run."
    width = max(map(len, options)) + 1
    yield f"{'':{width}} {' '.join(letters)}"
    for option in options:
        cells = [(option, family) for family in families]
        signs = ("X" if c in wrong else SIGNS.get(frozenset(kinds[c]), ".") for c in cells)
        yield f"{option:{width}} {' '.join(signs)}"


def _case(name: str) -> tuple[Case, str]:
    family, _, rest = name[name.index("[") + 1 : -1].partition("-")
    option, _, on = rest.rpartition("-")
    return (option, family), on
