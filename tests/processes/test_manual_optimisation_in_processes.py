"""Manual optimisation in several processes: the numbers of one device."""

import pytest
from cases import Case, assert_as_on_one_device
from test_manual_optimisation import (
    PARTS,
    Accumulating,
    Clamped,
    Clipping,
    ClippingByHand,
    ClippingValues,
    Lbfgs,
    Manual,
    WithClosures,
)

SOME = [Case(Accumulating), Case(Lbfgs), Case(Clipping), Case(Clamped, PARTS)]
OTHERS = [
    *map(Case, (Manual, ClippingByHand, ClippingValues)),
    Case(WithClosures, PARTS),
]


def test_the_numbers_are_those_of_one_device() -> None:
    assert_as_on_one_device(SOME, metrics=False)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (2, 4), (4, 4)])
def test_each_of_them(processes: int, devices: int) -> None:
    assert_as_on_one_device([*SOME, *OTHERS], processes, devices, metrics=False)
