"""Samples of unequal length: the loads are equal with split="cost", and the numbers are one's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle
from support.device_kinds import not_repeated
from support.oracle import assert_same, devices_of, run
from torch.utils.data import DataLoader

from lightning_dp.examples import stdlib_lm
from lightning_dp.examples.stdlib_lm import (
    SPLITS,
    CharacterLM,
    Loads,
    StdlibSource,
    collate,
    definitions,
    loads,
)
from lightning_dp.parallel.split import split_policy
from lightning_dp.parallel.step import StepParallel

LENGTH = 150


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of an op wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make() -> CharacterLM:
    return CharacterLM(width=8, layers=4)


def samples() -> list[bytes]:
    source = StdlibSource(files=12, max_length=LENGTH)
    source.setup("fit")
    assert len(source.train) >= oracle.SAMPLES
    return source.train[: oracle.SAMPLES]


def data() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=oracle.BATCH, collate_fn=collate)


@pytest.fixture(scope="module")
def one_device() -> dict[str, oracle.Run]:
    return {p: run(make, 1, data=data, precision=p) for p in ("32-true", "64-true")}


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_everything_is_as_on_one_device(on: str, k: int, one_device: dict[str, oracle.Run]) -> None:
    for precision, one in one_device.items():
        several = run(make, k, strategy={"split": "cost"}, data=data, precision=precision)
        assert_same(several, one, atol=1e-5)
    assert len(several.predictions[0]) == oracle.BATCH


@pytest.mark.parametrize("split", SPLITS)
def test_the_loads_of_the_table_are_those_of_the_devices(on: str, split: str) -> None:
    devices = devices_of(4)
    engine = StepParallel(
        make().to(devices[0]),
        devices,
        output_device=devices[0],
        split=split_policy(split, None, devices),
    )
    batch = collate(samples())
    parts = engine.scatter(batch).parts
    engine.close()
    expected = loads(batch["lengths"].tolist(), 4, split)
    assert [int(part["lengths"].sum()) for part in parts] == expected


@pytest.mark.slow
def test_cost_balances_what_other_splits_do_not() -> None:
    source = StdlibSource()
    source.setup("fit")
    table = Loads()
    for batch in source.train_dataloader():
        table.add(batch, devices=4)
    assert table.imbalance("cost") <= 1.02
    assert table.imbalance("even") >= 1.2 and table.imbalance("chunk") >= 1.2


def bits(model: CharacterLM, texts: list[bytes]) -> list[torch.Tensor]:
    batch = collate(texts)
    return list(torch.split(model._bits(batch), batch["lengths"].tolist()))


def test_a_character_is_predicted_from_those_before_it_in_its_sample() -> None:
    model = make().double()
    texts = [b"def f(x):", b"class Longer:\n    pass", b"x"]
    together = bits(model, texts)
    for text, found in zip(texts, together, strict=True):
        torch.testing.assert_close(found, *bits(model, [text]))
    changed = bits(model, [b"def f(x)?", b"class Longer:\n    past", b"y"])
    for found, other in zip(together, changed, strict=True):
        torch.testing.assert_close(found[:-1], other[:-1])
        assert found[-1] != other[-1]


def test_the_first_layers_reach_as_far_as_said() -> None:
    model = make().double()  # 4 layers: 16 characters
    first, second = (bits(model, [letter + b"." * 20])[0] for letter in (b"a", b"b"))
    differ = (first != second).nonzero().flatten().tolist()
    assert differ == list(range(17))


def test_definitions_are_read_as_python_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    texts = ["def f():\n    return 'é'\n", "class A:\n    def g(self): ...\n"]
    file.write_text("\n".join(["# coding: latin-1\nimport os\n", *texts]), encoding="latin-1")
    assert definitions(file) == texts


def test_validation_and_test_have_files_of_their_own() -> None:
    source = StdlibSource(files=10, max_length=100)
    source.setup("fit")
    parts = [source.train, source.val, source.test]
    assert all(parts) and max(len(sample) for part in parts for sample in part) <= 100
    again = StdlibSource(files=10, max_length=100)
    again.setup("test")
    assert [again.train, again.val, again.test] == parts


def test_the_baseline_knows_the_frequencies_of_the_training() -> None:
    source = StdlibSource()
    source.train, source.test = [b"aab"], [b"ab"]
    expected = torch.tensor([3 / 259, 2 / 259]).log2().mean()
    assert source.unigram_bits() == pytest.approx(-float(expected))


def test_it_writes_on() -> None:
    assert make().write("def ", length=5).startswith("def ")


@not_repeated
@pytest.mark.usefixtures("on")
def test_compare_shows_one_device_and_every_split(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stdlib_lm, "COMPARED_STEPS", 2)
    monkeypatch.setattr(stdlib_lm, "CharacterLM", make)
    devices_of(3)
    stdlib_lm.compare(StdlibSource(files=6, max_length=200), oracle.accelerator(), 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["loss", "in", "step", "1", "device", *SPLITS]
    furthest = next(line.split() for line in lines if "furthest off" in line)
    assert all(float(figure) < 1e-5 for figure in furthest[2:])
    (fullest,) = [line.split()[-3:] for line in lines if line.strip().startswith("fullest")]
    chunk, even, cost = map(float, fullest)
    assert cost < min(chunk, even)
