"""Notebooks: the cells of one, run in a real kernel, with reruns, an interrupt and a new class."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from textwrap import dedent
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")

IMPORTS = """
    import threading
    import time
    from pathlib import Path

    import lightning.pytorch as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_dp
"""
MODULE = """
    class Net(L.LightningModule):
        slow = False

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            if self.slow:
                time.sleep(0.02)
                Path("steps").open("a").write("x")
            loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(30, 4)), batch_size=10)

    def trainer(devices=4, accelerator="cpu", **options):
        return L.Trainer(
            strategy="dp_custom", accelerator=accelerator, devices=devices, max_epochs=2,
            logger=False, enable_checkpointing=False, **options,
        )

    def left():
        # Threads that do not end within some seconds.
        for _ in range(50):
            names = [t.name for t in threading.enumerate() if t.name.startswith("dp-")]
            if names:
                time.sleep(0.1)
        return names
"""
FIT = """
    torch.manual_seed(0)
    net, job = Net(), trainer()
    job.fit(net, data)
    print("sizes", job.strategy.last_sizes, "loss", round(float(job.callback_metrics["loss"]), 5))
    assert not left()
"""


class Kernel:
    """A running kernel, cell by cell."""

    def __init__(self, manager: Any, client: Any, folder: Path) -> None:
        self._manager, self._client, self.folder = manager, client, folder

    def run(self, cell: str, *, until: Callable[[], bool] = lambda: False) -> tuple[str, str]:
        """What a cell prints, and the name of the error it ends with.

        Whenever `until` says so, it is interrupted.
        """
        request, text, error = self._client.execute(dedent(cell)), "", ""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if until():
                self._manager.interrupt_kernel()
            try:
                message = self._client.get_iopub_msg(timeout=0.1)
            except Empty:
                continue
            content, kind = message["content"], message["msg_type"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream":
                text += content["text"]
            if kind == "error":
                error = content["ename"]
                text += "\n".join(content["traceback"])
            if kind == "status" and content["execution_state"] == "idle":
                return text, error
        raise TimeoutError(text)

    def works(self, cell: str) -> str:
        """What a cell prints that ends well."""
        text, error = self.run(cell)
        assert not error, text
        return text


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all tests, as its imports take longer than their cells."""
    from jupyter_client.manager import start_new_kernel

    folders = [*map(str, Path(__file__).parents[1:3]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    folder = tmp_path_factory.mktemp("notebook")
    manager, client = start_new_kernel(cwd=str(folder), env=env, startup_timeout=300)
    try:
        kernel = Kernel(manager, client, folder)
        kernel.works(IMPORTS)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


@pytest.fixture
def kernel(started: Kernel) -> Kernel:
    """With its module and data defined anew."""
    started.works(MODULE)
    return started


@pytest.mark.slow
def test_cells_of_a_notebook_run_again_with_one_devices_numbers(kernel: Kernel) -> None:
    first = kernel.works(FIT)
    assert "sizes (3, 3, 2, 2)" in first

    result = first[first.index("sizes") :]
    assert result in kernel.works(FIT), "the cell again"
    kernel.works("job.fit_loop.max_epochs = 4; job.fit(net, data); assert job.current_epoch == 4")

    one_device = FIT.replace("trainer()", "trainer(1)").replace("job.strategy.last_sizes", "()")
    assert result.split("loss")[1] in kernel.works(one_device)


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_in_the_next_cell(kernel: Kernel) -> None:
    steps, limit = kernel.folder / "steps", 20

    def is_due() -> bool:
        """One that hits code which swallows everything (a finaliser, say) has to be repeated."""
        nonlocal limit
        due = len(steps.read_text()) > limit
        limit += 400 * due
        return due

    steps.write_text("")
    kernel.works("net, job = Net(), trainer(); net.slow, job.fit_loop.max_epochs = True, 10_000")
    text, error = kernel.run("job.fit(net, data)", until=is_due)
    assert error and "KeyboardInterrupt" in text, text
    kernel.works("assert not left(), left()")
    kernel.works("assert 'log' not in vars(net), 'a stand-in'")
    # The same Trainer and module go on, and so do new ones.
    kernel.works("""
        net.slow, job.fit_loop.max_epochs = False, job.current_epoch + 2
        job.should_stop = False
        job.fit(net, data)
        assert job.current_epoch == job.fit_loop.max_epochs and not left()
    """)
    assert "sizes (3, 3, 2, 2)" in kernel.works(FIT)
