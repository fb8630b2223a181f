"""Does a call give the same values split as on one device, and if not, why? By experiment.

[Note: alone and split]
Both are the same call of an engine of the check's own, from the same state: *alone*, the root gets
all samples of the small batch and the other replicas none; *split*, each replica gets its shard.
Nothing else differs, so whatever comes out differently is the split's doing. Each run begins with
dropout off and the same seeds on every replica, and puts everything back.

`Comparison` compares the two. Where they differ, batch norm and random numbers, which differ in
every data-parallel trainer, are switched off one after the other, and both runs are made again. For
differences that remain, single shards run on the root: their losses and gradients show which
weights give those of the whole batch.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from contextvars import ContextVar
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lightning_dp.first_step.compare import (
    KNOWN,
    LOSS,
    NAMES,
    UNCHANGED,
    Key,
    Report,
    Values,
    differing,
    distance,
    is_finite,
    products,
    rounding,
)
from lightning_dp.first_step.snapshot import NotChecked, Snapshot, copy_to_cpu
from lightning_dp.parallel.apply import is_synced
from lightning_dp.parallel.engine import Engine, ReplicaCall
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.split import Sizes
from lightning_dp.parallel.step import loss_weights
from lightning_dp.parallel.torch_private import TorchDispatchMode

_ROUNDING_FACTOR = 30.0
"""A difference is rounding if it is at most this times that from slightly perturbed parameters."""
_CHANCE_FACTOR = 3.0
"""A difference is chance if it is at most this times that between seeds."""


def check(make_call: Callable[[], Call], report: Report) -> None:
    """Runs a call alone and split, and reports what differs and why, unless that is `skipped`.

    An error in the check is reported and does not reach the caller: the real call will raise it.
    """
    call = None
    if report.skipped:
        return
    with muted():
        try:
            call = make_call()
            Comparison(call).complete(report)
        except NotChecked as reason:
            report.skipped = str(reason)
        except Exception as error:
            report.skipped = f"the check raised {type(error).__name__}: {error}"
            report.raised = True
        finally:
            if call is not None:
                call.end()


_is_checking: ContextVar[bool] = ContextVar("_is_checking", default=False)


def is_checking() -> bool:
    """Whether this code runs for a check: calls of a wrapper inside are not checked themselves."""
    return _is_checking.get()


@contextmanager
def muted() -> Iterator[None]:
    """Drops what is printed, warned and logged meanwhile: the real call shows it again."""
    token = _is_checking.set(True)
    level, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        _is_checking.reset(token)


class Call(ABC):
    """What is checked: a call of a module with a small batch, and the program around it.

    Args:
        engine: an engine of the check's own, whose replicas run one after another.
        sizes: how many of the batch's samples each device gets.
        batch: the small batch.
        recording: records what a call reports elsewhere than in its output.
        others: optimizers and schedulers outside of the module, which are put back as well.

    Attributes:
        eps: the relative rounding error of the call.
        norms: layers that keep statistics of the batch, by name.
        draws: see `ConstantDraws`.
        python_draws: the state of Python's and NumPy's generators after the latest run's call.
    """

    reports_loss = True  # the loss is the user's own, and not made by the check
    compares_attributes = False  # that the call binds on modules
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # of the forward

    def __init__(
        self,
        engine: Engine,
        sizes: Sizes,
        batch: Any,
        *,
        recording: Callable[[], AbstractContextManager[Values]] = lambda: nullcontext({}),
        others: Mapping[str, Any] | None = None,
    ) -> None:
        self.module, self.engine, self.sizes, self._batch = engine.module, engine, sizes, batch
        self._recording = recording
        self.active = [k for k, size in enumerate(sizes) if size]
        dtypes = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        self.eps = rounding(dtypes or {torch.get_default_dtype()}, engine.devices[0].type)
        self.norms: dict[str, Any] = {
            name: layer
            for name, layer in self.module.named_modules()
            if getattr(layer, "track_running_stats", False)
            and layer.training
            and not is_synced(layer)
        }
        self.draws, self.python_draws = ConstantDraws(), b""
        devices = [*engine.devices, engine.output_device]
        self._snapshot = Snapshot(self.module, devices, others or {})

    @abstractmethod
    def on_replicas(self) -> ReplicaCall:
        """The call, as the engine makes it."""

    @abstractmethod
    def parse(self, output: Any) -> tuple[Tensor | None, Iterable[tuple[tree.Path, Any]]]:
        """The loss whose gradients are compared, if there is one, and the leaves of the rest."""

    def end(self) -> None:
        """Puts everything back as it was, and closes the engine."""
        try:
            self._snapshot.end()
        finally:
            self.engine.close()

    def run(
        self,
        *,
        split: bool = False,
        shard: int | None = None,
        cut_late: bool = False,
        seed: int = 0,
        perturbed: int = 0,
        norms_off: bool = False,
        constant_draws: bool = False,
    ) -> Values:
        """Makes the call and its backward, and puts everything back.

        Args:
            split: over the devices; else on the root alone.
            shard: which shard the root gets alone; None for the whole small batch.
            cut_late: the shard is cut from the whole batch after its transfer, not before.
            seed: of the random generators.
            perturbed: of rounding errors by which parameters are moved; 0 for none.
            norms_off: batch norm uses its running statistics.
            constant_draws: see `ConstantDraws`.
        """
        engine, snapshot, draws, sizes = self.engine, self._snapshot, self.draws, self.sizes

        def begin_draws() -> None:
            snapshot.reseed(seed)
            draws.count = 0

        idle = [0] * (len(sizes) - 1)
        engine.planner.policy = lambda n: sizes if split else (n, *idle)
        engine.before_replica = begin_draws
        try:
            begin_draws()
            if perturbed:
                snapshot.perturb(self.eps, perturbed)
            for layer in cast(Iterable[Any], self.module.modules()):
                if "Dropout" in type(layer).__name__:
                    layer.training = False
                elif isinstance(getattr(layer, "dropout", None), float):  # of attention, say
                    layer.dropout = 0.0
            for layer in self.norms.values() if norms_off else ():
                layer.training = False
            with draws if constant_draws else nullcontext(), self._recording() as values:
                batch, call = tree.map_leaves(copied, self._batch), self.on_replicas()
                if cut_late:
                    batch = call.transfer(batch, engine.devices[0])
                    call.transfer = lambda batch, device: batch
                if shard is not None:
                    batch = engine.cut(batch, sizes)[shard]
                engine.resync()
                with self.context():
                    output = engine.step(call, batch)
                self.python_draws = pickle.dumps((random.getstate(), np.random.get_state()))
                loss, rest = self.parse(output)
                if loss is not None and loss.requires_grad:
                    loss.backward()
            return {**values, **self._values(loss, rest)}
        finally:
            snapshot.restore()

    def _values(self, loss: Tensor | None, rest: Iterable[tuple[tree.Path, Any]]) -> Values:
        """Loss, outputs, gradients, and what the call has changed on the module."""
        values: Values = {}
        if loss is not None and self.reports_loss:
            values[LOSS] = float(loss.detach())
        for path, leaf in rest:
            values[Key("output", tree.name(path, ""))] = copy_to_cpu(leaf)
        norms = tuple(f"{name}." if name else "" for name in self.norms)
        for key, value in self._snapshot.changes(attributes=self.compares_attributes).items():
            if not (key[0] == "buffer" and key[1].startswith(norms)):
                values[Key(*key)] = value
        for name, parameter in self.module.named_parameters() if loss is not None else ():
            gradient = parameter.grad
            if parameter.requires_grad and not parameter.is_inference():  # no one trains those
                dense = None if gradient is None else copy_to_cpu(gradient).to_dense()
                values[Key("gradient", name)] = dense
        return values


def copied(leaf: Any) -> Any:
    """A copy of a batch's leaf that shares no memory with it; it may still require gradients."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)


class ConstantDraws(TorchDispatchMode):
    """Has the k-th random operation of a replica give one number, which depends on k alone.

    [Note: chance]
    A step that adds noise to each sample draws n numbers for n samples: a shard cannot draw those
    of the whole batch. With constant draws both compute the same, and what still differs is not
    chance. Truth values are 1, since 0 would hide all that samples contribute. `randperm` returns
    n-1 ... 0: a step that mixes samples mixes other pairs in a shard than in the whole batch.
    What stays random all the same (Python's and NumPy's numbers, a fused kernel's dropout) is
    compared with how much the call on the root alone differs from seed to seed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: dict[str, None] = {}  # of the random operations that ran
        self.count = 0  # of those in this replica
        self.dtypes: set[torch.dtype] = set()  # in which floating point numbers were computed
        self.uncontrolled = False  # one of them stayed random

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs one operation."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = str(func.overloadpacket).removeprefix("aten.")
            self.names[name] = None
            self.count += 1
            if name == "randperm":
                result.copy_(result.sort(descending=True).values)
            elif name == "native_dropout" and args[1] < 1:  # of accelerators
                result[0].copy_(args[0] / (1 - args[1]))
            elif isinstance(result, Tensor) and not name.startswith("rrelu"):
                spread = (self.count * 0.618) % 0.8 + 0.1
                number = 1 if name.startswith("bernoulli") else spread
                result.fill_(number if result.is_floating_point() else int(number))
            else:
                self.uncontrolled = True
        if isinstance(result, Tensor) and result.is_floating_point():
            self.dtypes.add(result.dtype)
        return result


class Comparison:
    """A call alone and split, and the experiments that a difference asks for.

    `_alone` and `_split` are the outcomes of the latest runs, under `_options`; `_found` are the
    distances of the values that differ in them and that no experiment has explained.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._options: dict[str, bool] = {}
        self._causes: dict[str, str] = {}
        self._unstable: set[Key] = set()  # values of no run but one, such as a logged time
        self._run_both()

    def complete(self, report: Report) -> None:
        """Makes the experiments, one after the other, as long as differences remain."""
        for experiment in (
            self._run_again,
            self._switch_norms_off,
            self._take_chance_away,
            self._perturb,
            self._cut_after_transfer,
            self._weigh_shards,
            self._name_values,
        ):
            if self._found and "not repeatable" not in self._causes:
                experiment()
        report.causes = self._causes
        for key in self._keys(*NAMES):
            alone, split = (values.get(key, UNCHANGED) for values in (self._alone, self._split))
            report.differences[key] = alone, split

    def _run(self, **options: Any) -> Values:
        return self._call.run(**self._options, **options)

    def _run_both(self, **options: bool) -> None:
        self._options |= options
        self._alone, self._split = self._run(), self._run(split=True)
        if not is_finite(self._alone):
            raise NotChecked("its loss or gradient is not finite on the root alone.")
        self._compare()

    def _compare(self) -> None:
        found = differing(self._alone, self._split, self._call.eps)
        self._found = {key: off for key, off in found.items() if key not in self._unstable}

    def _keep_beyond(self, others: Iterable[Values], factor: float) -> None:
        """Keeps differences above `factor` times the largest among other outcomes of `alone`."""
        largest = dict.fromkeys(self._found, 0.0)
        for other in others:
            for key in largest:
                off = distance(self._alone.get(key), other.get(key))
                largest[key] = max(largest[key], off)
        self._found = {k: off for k, off in self._found.items() if off > factor * largest[k]}

    def _keys(self, *kinds: str) -> list[Key]:
        return [key for kind in kinds for key in self._found if key.kind == kind]

    def _name(self, cause: str, *names: str, sentence: str = "") -> None:
        self._causes[cause] = _WHY[sentence or cause].format(*names)

    @cached_property
    def _shards(self) -> list[Values]:
        """Each shard's outcome on the root; asked for when the options do not change any more."""
        return [self._run(shard=k) for k in self._call.active]

    # The experiments

    def _run_again(self) -> None:
        """Alone once more, with the same seeds; and with a look at dtypes and random numbers."""
        call = self._call
        self._run(constant_draws=True)
        call.eps = max(call.eps, rounding(call.draws.dtypes, call.engine.devices[0].type))
        unstable = set(differing(self._alone, self._run(), call.eps))
        if any(key.kind in ("loss", "gradient", "output") for key in unstable & {*self._found}):
            self._name("not repeatable")
        else:
            self._unstable = unstable
            self._compare()

    def _switch_norms_off(self) -> None:
        if self._call.norms:
            before = self._found
            self._run_both(norms_off=True)
            found = self._found
            if found.keys() != before.keys() or any(found[k] < before[k] / 2 for k in found):
                self._name("batch norm", _listed(self._call.norms))

    def _take_chance_away(self) -> None:
        """Both with constant random draws, and alone with other seeds, see [Note: chance]."""
        # Python and NumPy draws depend on the number of samples if a shard leaves these generators
        # in another state than the whole batch does. Otherwise every replica draws what the root
        # draws, because all start from the same seed.
        states = set()
        for shard in (None, self._call.active[0]):
            self._run(shard=shard)
            states.add(self._call.python_draws)
        names = list(self._call.draws.names)
        if names or len(states) > 1:
            self._run_both(constant_draws=True)
            if len(states) > 1 or self._call.draws.uncontrolled:
                self._keep_beyond((self._run(seed=seed) for seed in range(1, 9)), _CHANCE_FACTOR)
            if not (self._found and names == ["randperm"]):  # pairs that differ are no chance
                self._name("random", ", ".join(names) or "numpy's or Python's")

    def _perturb(self) -> None:
        """Drops what parameters that are moved by rounding errors change as much."""
        self._keep_beyond((self._run(perturbed=i) for i in (1, 2, 3)), _ROUNDING_FACTOR)

    def _cut_after_transfer(self) -> None:
        """A shard as the whole batch's transfer hooks leave it, beside the shard's own."""
        keys = self._keys("loss", "gradient", "log", "output")
        if keys and self._call.reports_loss:
            late = self._run(shard=self._call.active[0], cut_late=True)
            if differing(self._shards[0], late, self._call.eps).keys() & {*keys}:
                self._name("transfer hook")

    def _weigh_shards(self) -> None:
        """Names a cause for a loss or gradients that differ."""
        if not self._keys("loss", "gradient"):
            return
        known = dict(self._call.module.named_parameters())
        made = [key.name for key in self._keys("gradient") if key.name not in known]
        if made:
            self._name("made in step", _listed(made))
        elif self._call.reports_loss:
            cause, *names = self._weights()
            if cause and not (cause == "whole batch" and "transfer hook" in self._causes):
                self._name(cause, *names)
        elif not self._keys("output"):
            self._name("output", "The backward of forward", sentence="forward")

    def _weights(self) -> tuple[str, ...]:
        """By which weights the shards' losses and gradients add up to those of the batch.

        [Note: the shards' weights]
        The joint loss is a weighted sum of the shards' losses, and so are its gradients. If some
        weights give the loss and the gradients of the whole batch, the loss is a sum (weights 1),
        a mean over samples (weights by sizes) or a mean over something else (whatever weights come
        nearest). If none do, it depends on which samples are together.
        """
        sizes = [size for size in self._call.sizes if size]
        sums, means = loss_weights(sizes, "sum"), loss_weights(sizes, "mean")
        finite = [k for k, shard in enumerate(self._shards) if is_finite(shard)]  # no items: NaN
        squares = products([self._alone, self._split, *(self._shards[k] for k in finite)])
        inverse = torch.linalg.pinv(squares[2:, 2:], hermitian=True)
        nearest_alone, nearest_split = (inverse @ squares[2:, :2]).T.tolist()

        def adds_up(which: int, weights: Sequence[float]) -> bool:
            """Whether the finite shards with these weights are alone (0) or split (1)."""
            vector = torch.tensor([0.0, 0.0, *weights], dtype=torch.float64)
            vector[which] = -1
            off = vector @ squares @ vector / squares[which, which]
            return float(off) <= max(self._call.eps, 1e-12)

        for cause, weights in (("sum", sums), ("mean", means)):
            if len(finite) == len(sizes) and adds_up(0, weights):
                # The split's own weights are other ones, or shards are not what they are alone.
                return (cause,) if adds_up(1, nearest_split) else ("",)
        counts = [max(0.0, weight) for weight in nearest_alone]
        counts = [count / (sum(counts) or 1.0) for count in counts]
        if adds_up(0, counts):
            shares = dict(zip(finite, counts, strict=True))
            texts = [shares.get(k, 0.0) for k in range(len(sizes))], means
            return ("items", *(", ".join(f"{w:.3f}" for w in of) for of in texts))
        return ("whole batch",)

    def _name_values(self) -> None:
        """Names a cause for each kind of other values that differ."""
        for kind in NAMES:
            keys = self._keys(kind)
            if kind == "log" and self._causes.keys() & {"whole batch", "transfer hook"}:
                # A loss that is logged as well has its cause already.
                alone, eps = self._alone, self._call.eps
                keys = [key for key in keys if distance(alone.get(LOSS), alone.get(key), eps)]
            if not keys or kind in ("loss", "gradient"):
                continue
            if kind != "output":
                cause = "logged value" if kind == "log" else kind
                self._name(cause, _listed([key.name for key in keys]))
                continue
            names = _listed([f"output{key.name}" for key in keys])
            if not self._call.reports_loss:
                self._name("output", names, sentence="forward")
            else:
                both = self._alone, self._split
                shapes = [[getattr(of.get(key), "shape", ()) for key in keys] for of in both]
                self._name("output" if shapes[0] == shapes[1] else "shapes", names)
        if not self._causes.keys() - {*KNOWN}:
            self._name("replicas")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


_SHARED = "All replicas write to what they share ({}). Write to it in on_train_batch_end, once."
_WHY = {
    "batch norm": (
        "batch norm in training normalizes each shard by its own statistics, as in DDP ({}); "
        "Trainer(sync_batchnorm=True) takes those of the whole batch."
    ),
    "random": (
        "random numbers ({}) are drawn by each replica for its own samples, so that numbers differ "
        "by chance, as from seed to seed."
    ),
    "not repeatable": (
        "The step differs from run to run on one device, with the same seeds: it keeps state, or "
        "draws from generators that the module does not hold. Seed these, and use "
        "Trainer(deterministic=True)."
    ),
    "made in step": (
        "Every replica makes parameters of its own ({}). Make them in __init__ or configure_model."
    ),
    "transfer hook": (
        "on_after_batch_transfer or transfer_batch_to_device looks at more than one sample, and "
        "sees each shard alone. Do that in on_before_batch_transfer, which has the whole batch."
    ),
    "sum": 'The loss is a sum over samples, not a mean: use loss_reduction="sum".',
    "mean": 'The loss is a mean over samples: leave out loss_reduction="sum", or num_items.',
    "items": (
        "The loss is a mean over something else than samples, such as valid tokens: the shards "
        "weigh {} in it, by number of samples {}. Return "
        '{{"loss": loss, "num_items": n}}, with the number n of what it is a mean over.'
    ),
    "whole batch": (
        "The loss is not a mean over samples. It looks at the whole batch at once (as Dice, "
        "contrastive and triplet losses and mixup do) or depends on how many samples there are: "
        'use mode="forward".'
    ),
    "forward": (
        "{} looks at more than one sample at a time, or is not one row per sample. Compute it "
        "from what forward returns for the whole batch, or say how it is joined by "
        'gather_overrides={{"name": "sum"}}.'
    ),
    "logged value": (
        "Logged values that are not means over samples: {}. Log a torchmetrics metric, or pass "
        'self.log(..., reduce_fx="sum") for a sum, of which an epoch logs the total, or '
        "batch_size=n for a mean over n items."
    ),
    "output": (
        "{} is not one row per sample, or looks at other samples of the batch. Return rows, say "
        'how they are joined by gather_overrides={{"name": "cat"}}, or use mode="forward".'
    ),
    "shapes": (
        "{} has a shape that depends on the other samples of a shard (padded to the longest, say). "
        "Pad to a fixed length, or return one item per sample in a list."
    ),
    "list": (
        "The items that the step leaves in {} are not rows or means over samples. Append rows, or "
        "say how items are joined by gather_overrides."
    ),
    "attribute": (
        "Of {} the value on the first replica is kept. Return it, to have it joined, or use one "
        "device."
    ),
    "buffer": (
        "Buffers that the step writes ({}) keep what the first replica left. Write what follows "
        'from the whole batch (self.all_gather), or use buffers="mean" or mode="forward".'
    ),
    **dict.fromkeys(("parameter", "state", "logger"), _SHARED),
    "replicas": (
        "Run one by one from the same state, the shards add up to the batch; as replicas they do "
        "not. The step writes to what replicas share, or keeps something from call to call."
    ),
}
"""Each cause, with what to write instead."""
