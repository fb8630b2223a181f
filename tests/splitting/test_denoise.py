"""Dense outputs: the root gets fewer samples with split="memory", and the numbers are one's."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import sim_devices
import torch
from support import oracle
from support.device_kinds import not_repeated
from support.oracle import assert_same, run
from support.processes import in_another_process
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.app.scripts import short_fits
from lightning_dp.examples import denoise
from lightning_dp.examples.denoise import Denoiser, DigitPages, by_sizes, picture, sizes


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of an op wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make() -> Denoiser:
    return Denoiser(width=8, levels=3)


def data() -> DataLoader[Any]:
    source = DigitPages(batch_size=25, pages=53, side=2)
    source.setup("fit")
    noisy, clean = source._noisy(source.train, torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(noisy, clean), batch_size=25)


@pytest.mark.parametrize("k", [3, 4])
def test_everything_is_as_on_one_device(on: str, k: int) -> None:
    several = run(make, k, strategy={"split": "memory"}, data=data, precision="64-true")
    assert_same(several, run(make, 1, data=data, precision="64-true"), atol=1e-8)
    assert [len(images) for images in several.predictions] == [25, 25, 3]


def balanced() -> tuple[Any, float, Any, float]:
    """Sizes, and the fullest device's peak over the mean, in the first and in the last steps."""
    sim_devices.enable(4)
    warnings.simplefilter("ignore")
    options: Any = {"accelerator": "sim", "devices": 4, "steps": 5}
    fits = short_fits(Denoiser, DigitPages(pages=160), ["memory"], **options)
    began, *_, ended = by_sizes(fits["memory"].steps)
    imbalances = [part.imbalance(part.peak_bytes) for part in (began, ended)]
    return sizes(began), imbalances[0], sizes(ended), imbalances[1]


@pytest.mark.sim_only("It is about the memory of devices that nothing else uses.")
def test_memory_is_balanced() -> None:
    began, imbalance, ended, left = in_another_process(balanced)
    assert began == (8, 8, 8, 8) and ended[0] < 8
    assert imbalance >= 1.1 and left <= 1.05


def test_pages_are_made_of_digits_and_those_for_testing_of_others() -> None:
    source = DigitPages(pages=64)
    source.setup("fit")

    def digits(pages: torch.Tensor) -> set[bytes]:
        tiles = pages.unfold(2, 8, 8).unfold(3, 8, 8).reshape(-1, 64)
        return {tile.numpy().tobytes() for tile in tiles}

    train, val, test = (digits(part) for part in (source.train, source.val[1], source.test[1]))
    assert source.train.shape == (64, 1, 32, 32)
    whole = {(image.float() / 16).numpy().tobytes() for image in _all_digits()}
    assert train | val | test <= whole
    assert not train & test and not train & val and not val & test


def _all_digits() -> torch.Tensor:
    return torch.as_tensor(denoise.load_digits().images)


def test_noise_is_new_in_every_epoch_and_the_same_in_every_run() -> None:
    first, second = DigitPages(pages=32), DigitPages(pages=32)
    for source in (first, second):
        source.setup("fit")
    epochs = [[list(loader) for _ in range(2)] for loader in _loaders(first, second)]
    for (noisy, clean), (again, _) in zip(epochs[0][0], epochs[1][0], strict=True):
        torch.testing.assert_close(noisy, again, rtol=0, atol=0)
        assert (noisy - clean).std() == pytest.approx(0.2, rel=0.05)
    noises = [noisy - clean for batches in epochs[0] for noisy, clean in batches]
    assert not torch.allclose(*noises)


def _loaders(*sources: DigitPages) -> list[DataLoader[Any]]:
    return [source.train_dataloader() for source in sources]


def test_images_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(ValueError, match="width: expected a multiple of 4, as levels=3, got 6"):
        make()(torch.zeros(1, 1, 8, 6))


def test_a_picture_shows_dark_and_light() -> None:
    page = torch.zeros(2, 1, 16, 16)
    page[0, 0, 0, 0] = 1
    first, *rest = picture([page, page, page]).split("\n")
    assert first.count("@@") == 3 and len(rest) == 7 and not "".join(rest).strip()


@not_repeated
def test_compare_shows_one_device_and_both_splits(
    on: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(denoise, "COMPARED_STEPS", 3)
    monkeypatch.setattr(denoise, "Denoiser", make)
    oracle.devices_of(3)
    denoise.compare(DigitPages(pages=96, side=2), oracle.accelerator(), 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["loss", "in", "step", "1", "device", "even", "memory"]
    furthest = next(line.split() for line in lines if "furthest off" in line)
    assert all(float(figure) < 1e-5 for figure in furthest[2:])
    table = [line.split()[:1] for line in lines[-2:]]
    assert (table == [["even"], ["memory"]]) == (on != "cpu")
