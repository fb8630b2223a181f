"""Trainers are made quickly, and only the check's own tests run it."""

from __future__ import annotations

from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def only_own_checks(request: pytest.FixtureRequest) -> None:
    """Without it, where another warning or error about the same steps is tested."""
    if request.path.stem not in ("test_first_step", "test_laws"):
        request.getfixturevalue("unchecked")


@pytest.fixture(scope="session", autouse=True)
def no_external_callbacks() -> object:
    """Lightning searches all installed packages for them, for each Trainer."""
    connector = "lightning.pytorch.trainer.connectors.callback_connector"
    with mock.patch(f"{connector}._load_external_callbacks", lambda group: []):
        yield
