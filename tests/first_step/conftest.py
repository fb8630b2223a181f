"""Tests of the detectors run without the check, which would name the same steps once more."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def detectors_alone(request: pytest.FixtureRequest) -> None:
    if request.path.stem not in ("test_first_step", "test_laws"):
        request.getfixturevalue("unchecked")
