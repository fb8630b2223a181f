"""A long run leaves no growing memory, threads or replicas."""

from __future__ import annotations

import threading

import pytest
from support import oracle
from support.long_runs import Busy, Count, check_flat
from support.oracle import loader

from lightning_dp import DataParallelStrategy

pytestmark = [pytest.mark.usefixtures("on", "one_thread"), pytest.mark.slow]

STEPS = 1_000
PER_EPOCH = 25


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_1000_steps_of_fit_and_validate_leave_nothing_behind(mode: str) -> None:
    count = Count(oracle.devices_of(3))
    strategy = DataParallelStrategy(mode=mode, executor="threads")
    options = {"callbacks": [count], "max_epochs": STEPS // PER_EPOCH}
    job = oracle.trainer(3, strategy, **options)
    train, val = loader(n=PER_EPOCH * 6, batch_size=6), loader(n=20, batch_size=10)
    before = threading.active_count()
    job.fit(Busy(), train, val)
    assert job.global_step == STEPS
    check_flat(count.counts)
    assert threading.active_count() == before


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_many_runs_of_one_trainer_leave_nothing_behind(mode: str) -> None:
    count = Count(oracle.devices_of(3))
    job = oracle.trainer(3, DataParallelStrategy(mode=mode), callbacks=[count], max_epochs=1)
    module, data = Busy(), loader(n=24, batch_size=6)
    for turn in range(20):
        job.fit_loop.max_epochs = turn + 1
        job.fit(module, data, data)
        job.validate(module, data, verbose=False)
        job.predict(module, data)
    check_flat(count.counts)
