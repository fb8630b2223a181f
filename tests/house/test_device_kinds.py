"""Which kinds of devices a process tests on: as its command line asks, and as the machine has."""

from __future__ import annotations

import pytest
from support import device_kinds


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """To say how many GPUs there are; what is chosen is forgotten again."""
    monkeypatch.setattr(device_kinds, "kinds", device_kinds.kinds)
    monkeypatch.setattr("sim_devices.IS_SUPPORTED", True)
    return monkeypatch


@pytest.mark.parametrize(
    ("asked", "markers", "count", "kinds"),
    [
        (None, "not slow", 0, ("cpu", "sim")),
        (None, "not multigpu", 2, ("cpu", "sim")),
        ("sim", "", 2, ("cpu", "sim")),
        ("cuda", "", 1, ("cpu", "cuda", "multigpu")),
        (None, "multigpu and not slow", 2, ("cpu", "cuda", "multigpu")),
    ],
)
def test_kinds_are_those_asked_for(
    asked: str | None, markers: str, count: int, kinds: tuple[str, ...], gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr("torch.cuda.device_count", lambda: count)
    device_kinds.choose(asked, markers)
    assert device_kinds.kinds == kinds
    shown = device_kinds.header()
    assert shown.startswith(f"devices: {', '.join(kinds)}")
    assert ("pytest --on cuda" in shown) == (count > 0 and "sim" in kinds)


@pytest.mark.parametrize(("asked", "markers"), [("cuda", ""), (None, "multigpu")])
def test_without_a_gpu_it_is_an_error(
    asked: str | None, markers: str, gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(pytest.UsageError, match=r"expected a GPU, but torch \S+ finds none"):
        device_kinds.choose(asked, markers)


def test_devices_of_a_kind(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr("torch.cuda.device_count", lambda: 2)
    assert list(map(str, device_kinds.devices("cpu", 2))) == ["cpu", "cpu"]
    assert list(map(str, device_kinds.devices("cuda", 3))) == ["cuda:0"] * 3
    assert list(map(str, device_kinds.devices("multigpu", 2))) == ["cuda:0", "cuda:1"]
    with pytest.raises(pytest.skip.Exception, match="needs 3 GPUs, found 2"):
        device_kinds.devices("multigpu", 3)
