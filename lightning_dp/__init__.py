"""Data parallelism for PyTorch Lightning in one process, with the numbers of one device.

`import lightning_dp` registers the strategy: `Trainer(strategy="dp_custom", devices=4)`.
"""

from pathlib import Path

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp.checkpointing import ModulePrefixCheckpointIO
from lightning_dp.keys import normalize_state_dict
from lightning_dp.monitor import DataParallelMonitor
from lightning_dp.parallel.data_parallel import DataParallel, data_parallel
from lightning_dp.parallel.primitives import gather, parallel_apply, replicate, scatter
from lightning_dp.strategy import DataParallelStrategy

__all__ = [
    "DataParallel",
    "DataParallelMonitor",
    "DataParallelStrategy",
    "ModulePrefixCheckpointIO",
    "data_parallel",
    "gather",
    "normalize_state_dict",
    "parallel_apply",
    "replicate",
    "scatter",
]

DataParallelStrategy.register_strategies(StrategyRegistry)

if not (Path(__file__).parent / "conf").exists():
    # A checkout that is not installed: conf/ and examples/ lie beside this package, not in it.
    __path__.append(str(Path(__file__).parent.parent))
