"""Data parallelism for PyTorch Lightning in one process, with the numbers of one device.

`import lightning_dp` registers the strategy: `Trainer(strategy="dp_custom", devices=4)`.

The engine is `parallel`, which imports torch only. For Lightning: the `strategy` and its `modes`;
what a step logs and measures (`recording`) and leaves on self (`state`); the check of the
`first_step`; `split="auto"` on the root alone (`auto_split`); several `processes`; sync batch norm
(`layer_sync`); private names (`lightning_private`); the package `pytorch_lightning`; tables on a
terminal (`table`).
"""

import sys
from pathlib import Path

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp.checkpointing import ModulePrefixCheckpointIO
from lightning_dp.checkpointing.state_keys import normalize_state_dict
from lightning_dp.data_parallel import DataParallel
from lightning_dp.monitor import DataParallelMonitor
from lightning_dp.parallel.functional import gather, parallel_apply, replicate, scatter
from lightning_dp.parallel.gather import pad
from lightning_dp.strategy import DataParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "DataParallelMonitor",
    "DataParallelStrategy",
    "ModulePrefixCheckpointIO",
    "gather",
    "normalize_state_dict",
    "pad",
    "parallel_apply",
    "replicate",
    "scatter",
]

DataParallelStrategy.register_strategies(StrategyRegistry)

if not (Path(__file__).parent / "conf").exists():
    # A checkout that is not installed: conf/ and examples/ lie beside this package, not in it.
    __path__.append(str(Path(__file__).parent.parent))

if "pytorch_lightning" in sys.modules:  # its Trainers are to know the strategy, too
    import lightning_dp.pytorch_lightning  # noqa: F401  # registers it
