"""A fit as a script for torchrun: `started.py FOLDER FAULT`, which befalls process 1.

Each process writes its parameters to FOLDER/done-RANK.pt if it comes to the end, and to
FOLDER/group-RANK whether torch's process group is still there when Python ends.
"""

import atexit
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import DataParallelStrategy


class Net(LightningModule):
    """Something happens to it at the fourth batch."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.net, self.fault = nn.Linear(10, 3), fault

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 1 and self.fault == "raise":
            raise ValueError("the data are bad")
        if batch_idx == 3 and self.global_rank == 1 and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


if __name__ == "__main__":
    rank = os.environ.get("RANK", "0")
    group = Path(sys.argv[1], f"group-{rank}")
    atexit.register(lambda: group.write_text(str(torch.distributed.is_initialized())))
    torch.set_num_threads(1)
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_model_summary"], False)
    own: Any = DataParallelStrategy(executor="inorder", timeout=60)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=own, max_epochs=2, **quiet)
    net = Net(sys.argv[2])
    trainer.fit(net, DataLoader(torch.randn(53, 10), batch_size=9))
    torch.save(net.state_dict(), Path(sys.argv[1], f"done-{rank}.pt"))
