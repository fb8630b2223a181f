"""Step mode: a step runs in every replica on its shard; losses are joined, gradients summed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_dp.parallel.call import PLAIN, ReplicaCall, Transfer
from lightning_dp.parallel.gather import without_rows
from lightning_dp.parallel.out_of_memory import RecoveringEngine
from lightning_dp.parallel.reduce import (
    Graph,
    JointBackward,
    LossReduction,
    StepOutput,
    agreed_items,
    join_losses,
    loss_of,
    loss_weights,
    wait_for_autograd,
)
from lightning_dp.parallel.scatter import Shards
from lightning_dp.parallel.torch_private import hooked

if TYPE_CHECKING:
    from lightning_dp.parallel.processes import Losses


class _Joined(NamedTuple):
    """What the replicas of one process have returned."""

    sizes: list[int]  # of the shards that have a loss
    steps: list[StepOutput]
    graphs: list[Graph]
    loss: Tensor | None
    items: float | None
    has_graph: bool


class StepParallel(RecoveringEngine):
    """Runs a method of a module on all replicas, each on its shard of the batch.

    What comes back is what one device would have returned: outputs in order, the loss of the
    whole batch, and after its backward the gradients of the whole batch in the root's parameters.

    Example:
        >>> class Net(nn.Linear):
        ...     def training_step(self, batch):
        ...         return self(batch).square().mean()
        >>> cpu = torch.device("cpu")
        >>> net = Net(3, 1)
        >>> engine = StepParallel(net, [cpu] * 2, output_device=cpu, split=lambda n: (n - 1, 1))
        >>> engine.train("training_step", torch.randn(8, 3)).backward()
        >>> net.weight.grad.shape
        torch.Size([1, 3])
        >>> engine.close()
    """

    expects_samples = True

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        loss_reduction: LossReduction = "mean",
        **options: Any,
    ) -> None:
        super().__init__(module, devices, **options)
        self.loss_reduction: LossReduction = loss_reduction
        self.has_own_backward = False  # the module overrides `backward`
        self._has_warned_of_none = False

    def train(self, method: str, batch: Any, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and joins the losses; see `TrainingStep`."""
        return self.step(TrainingStep(self, method, args), batch)

    def evaluate(self, method: str, batch: Any, *args: Any) -> Any:
        """Calls `method(shard, *args)` on the replicas and gathers what it returns."""
        return self.step(EvaluationStep(self, method, args), batch)

    def warn_of_none(self, step: str, count: int, of: int) -> None:
        """Warns once that some replicas returned no loss while others did."""
        if not self._has_warned_of_none:
            self._has_warned_of_none = True
            warnings.warn(
                f"{step}: expected a loss from every replica or from none, got None from {count} "
                f"of {of}. Their samples are left out; one device leaves out the whole batch. Let "
                "all decide alike, by what self.all_gather(...) returns, or use "
                'DataParallelStrategy(mode="forward").',
                stacklevel=2,
            )

    def requested_parameters(self) -> list[Tensor]:
        """Parameters of which an own backward may ask gradients, without those that have hooks.

        Autograd calls hooks although there is no gradient for them.
        """
        parameters = self.replicas.root_parameters
        with_hooks = set(hooked(parameters))
        return [p for i, p in enumerate(parameters) if p.requires_grad and i not in with_hooks]


class EvaluationStep(ReplicaCall):
    """Calls a method of the module with each shard, and gathers what it returns."""

    is_training = False
    shards: Shards  # the latest ones that it was made with

    def __init__(
        self,
        engine: StepParallel,
        method: str,
        args: tuple[Any, ...] = (),
        transfer: Transfer = PLAIN,
    ) -> None:
        self.name, self.training, self.transfer = method, self.is_training, transfer
        self.engine, self.args = engine, args
        if self.training and engine.frozen_may_change:
            self.copied_parameters = "frozen"

    def begin(self, shards: Shards) -> None:
        """Remembers the shards: an optimizer's closure may come for the same ones again."""
        self.shards = shards
        if torch.is_grad_enabled():
            self.engine.replicas.refuse_trained_buffers()

    def on_replica(self, module: nn.Module, shard: Any) -> Any:
        """The replica's own method."""
        return getattr(module, self.name)(shard, *self.args)

    def gather(self, outputs: list[Any], shards: Shards) -> Any:
        """See `gather`."""
        sizes, order = shards.active_sizes, shards.active_order
        return self.engine.join(outputs, sizes=sizes, order=order, row_rules=shards.row_rules)


class TrainingStep(EvaluationStep):
    """Calls a method of the module with each shard, and joins the losses that it returns.

    The method returns a loss, or a mapping with the key "loss", or None to leave its shard out. If
    the loss is a mean over something else than samples, "num_items" says how many: an entry of
    the mapping or an attribute of the loss.

    What comes of it is as the method returns it: the joint loss, whose backward fills the root's
    `.grad`; a dict with it and the other entries gathered; or None if no replica returned a loss.
    """

    is_training = has_backward = True
    _losses: Losses | None = None  # of this rank, and of all once they are exchanged

    def leave(self, outputs: list[Any], devices: Collection[torch.device]) -> list[Any]:
        """Losses stay, too: their backward begins where they are."""
        steps = [None if out is None else StepOutput.parse(out) for out in outputs]
        parts = [s and (s.loss.detach(), s.num_items, s.extras) for s in steps]
        left = super().leave(parts, devices)
        return [
            step and step._replace(value=sent[0], num_items=sent[1], extras=sent[2])
            for step, sent in zip(steps, left, strict=True)
        ]

    def exchange_losses(self, outputs: list[Any], shards: Shards) -> _Joined:
        """Sends the loss to the other ranks once; a rerun after out-of-memory does not repeat it.

        The others have gone on by then.
        """
        from lightning_dp.parallel.processes import Losses, OwnLoss

        joined = self._join(outputs, shards)
        if self._losses is None or self._losses.of_all is None:
            world, loss = self.engine.world, joined.loss
            value, dtype = (None, None) if loss is None else (float(loss), loss.dtype)
            is_idle = world is not None and world.is_idle
            samples = 0 if is_idle else sum(joined.sizes) or sum(shards.sizes)
            buffers = self.engine.reducer.rank_buffers
            writes = buffers is not None and (
                buffers.has_written() or not self.engine.reducer.root_keeps_its_buffers(shards)
            )
            own = OwnLoss(value, samples, joined.items, joined.has_graph, dtype, writes)
            self._losses = Losses(own)
        shards.losses[:] = [self._losses]
        return joined

    def gather(self, outputs: list[Any] | _Joined, shards: Shards) -> Any:
        """The joint loss, with its backward."""
        own = outputs if isinstance(outputs, _Joined) else self._join(outputs, shards)
        sizes, steps, graphs, joint, items, has_graph = own
        engine, world = self.engine, self.engine.world
        if world is not None:
            of_all = cast("Losses", self._losses).join(world, is_sum=engine.loss_reduction == "sum")
            if engine.reducer.rank_buffers is not None:
                engine.reducer.rank_buffers.exchanged(of_all)
            value, dtype, device = of_all.value, of_all.dtype, engine.output_device
            joint = None if value is None else torch.tensor(value, dtype=dtype, device=device)
            graphs = [graph._replace(weight=graph.weight * of_all.share) for graph in graphs]
            items, has_graph = of_all.items, of_all.has_graph
        if joint is not None and has_graph:
            how = (engine.calls.crossed, engine.backward, engine.accelerators)
            backward = JointBackward(self.name, shards, graphs, *how, engine.calls.rank_graph)
            requested = engine.requested_parameters() if engine.has_own_backward else ()
            joint = backward.attach(joint, requested)
        if not steps or steps[0].extras is None:
            return joint
        order = None if shards.order is None else [shards.order[g.replica] for g in graphs]
        extras = engine.join(
            [step.extras for step in steps], sizes=sizes, order=order, row_rules=shards.row_rules
        )
        if world is not None and world.is_idle:
            extras = without_rows(extras, shards.row_rules.dim, sum(shards.sizes))
        whole: dict[str, Any] = {"loss": joint, **extras}
        if steps[0].has_items_entry:
            given, whole["num_items"] = steps[0].num_items, items
            if items is not None and isinstance(given, Tensor):  # then that of all is one, too
                whole["num_items"] = torch.full_like(given, items, device=engine.output_device)
        return whole

    def _join(self, outputs: list[Any], shards: Shards) -> _Joined:
        """Joins the losses of this process's replicas."""
        returned, sizes, steps, counts = [], [], [], []
        for k, out in zip(shards.active, outputs, strict=True):
            if out is None:
                continue
            if type(out) is Tensor and out.numel() == 1 and not out.__dict__:
                step = StepOutput(out)  # as `parse` would; most steps return such a loss
            else:
                step = out if type(out) is StepOutput else StepOutput.parse(out)
            returned.append(k)
            sizes.append(shards.sizes[k])
            steps.append(step)
            counts.append(step.num_items)
        if 0 < len(steps) < len(outputs):
            self.engine.warn_of_none(self.name, len(outputs) - len(steps), len(outputs))
        items = None if {*map(type, counts)} <= {type(None)} else agreed_items(counts)
        if not steps:
            return _Joined([], [], [], None, None, False)
        weights = loss_weights(sizes, self.engine.loss_reduction, items)
        graphs, has_graph = [], False
        for k, step, weight in zip(returned, steps, weights, strict=True):
            graphs.append(Graph(k, step.loss, weight, step.value))
            has_graph = has_graph or step.loss.requires_grad
        loss = join_losses(graphs, self.engine.output_device)
        return _Joined(sizes, steps, graphs, loss, None if items is None else sum(items), has_graph)

    def finish(self, result: Any, gradient: Tensor | None = None) -> None:
        """The joint loss's backward."""
        loss = loss_of(result)
        if loss is None or not loss.requires_grad:
            return
        try:
            loss.backward(gradient)
        except torch.OutOfMemoryError:
            wait_for_autograd(self.engine.devices)
            raise
