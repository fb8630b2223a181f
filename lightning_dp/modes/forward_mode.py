"""Forward mode: the step runs once, and the calls of the module are spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from lightning_dp.lightning_private import own_device
from lightning_dp.metrics import Journals, is_metric
from lightning_dp.modes.spread_check import SpreadCheck
from lightning_dp.modes.step_mode import Mode
from lightning_dp.modes.transfer_hooks import transfers_plainly
from lightning_dp.parallel.batch import Shards, bring
from lightning_dp.parallel.contexts import Contexts, replaced
from lightning_dp.parallel.forward import ForwardParallel
from lightning_dp.parallel.generated import context
from lightning_dp.parallel.gradients import LossReduction
from lightning_dp.parallel.replicas import Replicas

if TYPE_CHECKING:
    from lightning_dp.modes.forward_in_processes import ForwardInProcesses
    from lightning_dp.parallel.processes import World


class ForwardMode(Mode):
    """The step runs once, with the whole batch; the module's calls are spread over the replicas.

    The engine is a `ForwardParallel`. Without `move_batch` the batch stays where the DataLoader
    left it. Each of several processes runs it with its part of the batch.
    """

    _processes: ForwardInProcesses | None = None

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        *,
        move_batch: bool,
        loss_reduction: LossReduction = "mean",
        **options: Any,
    ) -> None:
        super().__init__(module, devices, **options)
        for submodule in module.modules():
            if is_metric(submodule):
                submodule.to(self._options["output_device"])  # where the step's tensors are
        # The mode itself would be a cycle, which keeps replicas alive until it is found.
        context = partial(_around_forward, self._journals, module, devices[0])
        own, several = {"context": context, "scalars": "merge", **self._options}, self._processes
        make: Any = ForwardParallel if several is None else partial(several.engine, loss_reduction)
        self.engine: ForwardParallel = make(module, devices, **own)
        self.moves_batch = move_batch
        self._check = SpreadCheck(module, self.engine)

    def _new_journals(self, world: World | None, devices: Any, output: Any) -> Journals:
        if world is None:
            return super()._new_journals(None, devices, output)
        from lightning_dp.modes.forward_in_processes import ForwardInProcesses

        self._processes = ForwardInProcesses(self._module, world, devices, output)
        return self._processes.journals

    def batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Brings the batch to the output device, where the step's own computations are."""
        if not self.moves_batch:
            return batch
        device, ahead = self.engine.output_device, self.engine.ahead
        if ahead is not None and transfers_plainly(self._module):
            [batch] = bring([batch], [device], ahead)
        return self._transfer(batch, device, dataloader_idx=dataloader_idx)

    def step(self, method: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Calls it once, on this thread."""
        self._check.begin()
        call, several = partial(getattr(self._module, method), batch, *args), self._processes
        with self.engine.spreading(), _at(self._module, self.engine.output_device):
            output = call() if several is None else several.step(method, call, batch)
        self._check.end(method, output)
        return output

    def of_closure(self, result: Any) -> Any:
        """Of several processes it is of all."""
        return result if self._processes is None else self._processes.of_closure(result)

    @context
    def during_backward(self) -> Iterator[None]:
        """Checkpoints call the module again, and must find the calls spread as they were."""
        here = _at(self._module, self.engine.output_device)
        several = nullcontext() if self._processes is None else self._processes.during_backward()
        with super().during_backward(), self.engine.spreading(), here, several:
            yield


def _at(module: LightningModule, device: torch.device) -> AbstractContextManager[None]:
    """While it lasts, `self.device` is where the running code's tensors are."""
    return replaced(module, **own_device(module, device))


def _around_forward(
    journals: Journals,
    module: LightningModule,
    device: torch.device,
    replicas: Replicas,
    hook: str,
    shards: Shards,
    is_rerun: bool,
) -> AbstractContextManager[None]:
    """What replicas log and measure inside of a spread call is joined as in a step."""
    return Contexts([journals.around(replicas, shards, is_rerun), _at(module, device)])
