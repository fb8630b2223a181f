"""Trainers are made quickly."""

from __future__ import annotations

from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_external_callbacks() -> object:
    """Lightning searches all installed packages for them, for each Trainer."""
    connector = "lightning.pytorch.trainer.connectors.callback_connector"
    with mock.patch(f"{connector}._load_external_callbacks", lambda group: []):
        yield
