"""Embeddings of limited norm in several processes: rows are shortened whoever has used them."""

from typing import Any

import pytest
from cases import Case, assert_as_on_one_device
from oracle import ByHand
from test_same_numbers import LimitedEmbedding


class LimitedByHand(ByHand, LimitedEmbedding):
    """The same with manual optimisation."""


MODES: list[dict[str, Any]] = [{}, {"mode": "forward"}]
CASES = [Case(LimitedEmbedding, mode, samples=51) for mode in MODES]


def test_rows_are_those_of_one_device() -> None:
    assert_as_on_one_device(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_rows_are_those_of_one_device_on_any_number(devices: int) -> None:
    cases = [*CASES, *(Case(LimitedByHand, mode) for mode in MODES)]
    others = [Case(LimitedEmbedding, options=o) for o in ({"accumulate_grad_batches": 2},)]
    assert_as_on_one_device([*cases, *others], devices=devices)
