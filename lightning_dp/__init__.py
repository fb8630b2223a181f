"""Data parallelism for PyTorch Lightning in one process, with the numbers of one device.

`import lightning_dp` registers the strategy: `Trainer(strategy="dp_custom", devices=4)`.

The engine is `parallel`. For Lightning there are the `strategy`, its `options`, what it has
`measured`, its `modes`, steps of the root `alone`, hooks `between_steps`, batch norm
(`layer_sync`), whether code looks at gradients between micro-batches (`gradient_hooks`),
`predictions` of all processes, `hints` for people; private names (`lightning_private`); the other
package (`pytorch_lightning`). Programs outside of `app` are `convert`, and what they print on a
terminal, `table`. Imports run downwards only, and a wing offers what its `__init__` names.
"""

import sys
from pathlib import Path

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp.checkpointing import ModulePrefixCheckpointIO
from lightning_dp.hints import leave_out
from lightning_dp.keys import normalize_state_dict
from lightning_dp.monitor import DataParallelMonitor
from lightning_dp.parallel.data_parallel import DataParallel, data_parallel
from lightning_dp.parallel.primitives import gather, parallel_apply, replicate, scatter
from lightning_dp.predictions import PredictionGatherer
from lightning_dp.strategy import DataParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "DataParallelMonitor",
    "DataParallelStrategy",
    "ModulePrefixCheckpointIO",
    "PredictionGatherer",
    "data_parallel",
    "gather",
    "normalize_state_dict",
    "parallel_apply",
    "replicate",
    "scatter",
]

DataParallelStrategy.register_strategies(StrategyRegistry)
leave_out()

if not (Path(__file__).parent / "conf").exists():
    # A checkout that is not installed: conf/ and examples/ lie beside this package, not in it.
    __path__.append(str(Path(__file__).parent.parent))

if "pytorch_lightning" in sys.modules:  # its Trainers are to know the strategy, too
    import lightning_dp.pytorch_lightning  # noqa: F401  # registers it
