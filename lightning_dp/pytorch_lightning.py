"""The same strategy for the separate package `pytorch_lightning`.

`lightning` and `pytorch_lightning` are two copies of the same code; neither takes objects of the
other. `import lightning_dp.pytorch_lightning` makes the second one know the strategy too:

    import pytorch_lightning as pl
    import lightning_dp.pytorch_lightning

    pl.Trainer(strategy="dp_custom", devices=4)
    pl.Trainer(strategy=lightning_dp.pytorch_lightning.DataParallelStrategy(mode="forward"))

So are `ModulePrefixCheckpointIO` for `pl.Trainer(plugins=[...])`, and `DataParallelMonitor`.
"""

from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning import Callback
from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry

from lightning_dp.checkpointing import ModulePrefixMixin
from lightning_dp.monitor import DataParallelMonitor as _Monitor
from lightning_dp.strategy import DataParallelMixin

__all__ = ["DataParallelMonitor", "DataParallelStrategy", "ModulePrefixCheckpointIO"]


# To type checkers the mixin's base is lightning's ParallelStrategy; at run time it has none.
class DataParallelStrategy(  # type: ignore[misc]  # two ParallelStrategy  # noqa: D101  # `__doc__`
    DataParallelMixin, ParallelStrategy
):
    __doc__ = DataParallelMixin.__doc__

    package = "pytorch_lightning"


class ModulePrefixCheckpointIO(ModulePrefixMixin, CheckpointIO):  # noqa: D101  # `__doc__`
    __doc__ = ModulePrefixMixin.__doc__


class DataParallelMonitor(_Monitor, Callback):  # type: ignore[misc]  # two bases
    """`lightning_dp.DataParallelMonitor` for a Trainer of `pytorch_lightning`."""


DataParallelStrategy.register_strategies(StrategyRegistry)
