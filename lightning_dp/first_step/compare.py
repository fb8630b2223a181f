"""Which values of a call differ when it is split, and why? By experiment.

Where the call alone and split differ (see [Note: alone and split]), batch norm and random numbers,
which differ in every data-parallel trainer, are switched off one after the other, and both runs are
made again. For differences that remain, single shards run on the root: their losses and gradients
show which weights give those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_dp.first_step.call import Call, muted
from lightning_dp.first_step.report import KNOWN, LOSS, NAMES, UNCHANGED, WHY, Key, Report, Values
from lightning_dp.first_step.snapshot import NotChecked
from lightning_dp.parallel.scatter import tree
from lightning_dp.parallel.step import loss_weights

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


class Comparison:
    """A call alone and split, and the experiments that explain a difference.

    `_alone` and `_split` are the outcomes of the latest runs, under `_options`; `_found` are the
    distances of the values that differ in them and that no experiment has explained.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._device_type = call, call.engine.devices[0].type
        self._eps = rounding({p.dtype for p in call.module.parameters()}, self._device_type)
        self._options: dict[str, Any] = {}
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
        found = differing(self._alone, self._split, self._eps)
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
        self._causes[cause] = WHY[sentence or cause].format(*names)

    @cached_property
    def _shards(self) -> list[Values]:
        """Each shard's outcome on the root; asked for when the options do not change any more."""
        return [self._run(shard=k) for k in self._call.active]

    # The experiments

    def _run_again(self) -> None:
        """Alone once more, with the same seeds; and with a look at dtypes and random numbers."""
        call = self._call
        self._run(constant_draws=True)
        self._eps = max(self._eps, rounding(call.draws.dtypes, self._device_type))
        unstable = set(differing(self._alone, self._run(), self._eps))
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
        """Drops differences that perturbing the parameters by `eps` makes on the root, too."""
        moved = (self._run(perturbed=(self._eps, i)) for i in (1, 2, 3))
        self._keep_beyond(moved, _ROUNDING_FACTOR)

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
            if cause:
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
        outcomes = [self._alone, self._split, *(self._shards[k] for k in finite)]
        squares = products(outcomes).nan_to_num(0.0)  # the split ones may be NaN
        inverse = torch.linalg.pinv(squares[2:, 2:], hermitian=True)
        nearest_alone, nearest_split = (inverse @ squares[2:, :2]).T.tolist()

        def adds_up(which: int, weights: Sequence[float]) -> bool:
            """Whether the finite shards with these weights are alone (0) or split (1)."""
            vector = torch.tensor([0.0, 0.0, *weights], dtype=torch.float64)
            vector[which] = -1
            off = vector @ squares @ vector / squares[which, which]
            return float(off) <= max(self._eps, 1e-12)

        for cause, weights in (("sum", sums), ("mean", means)):
            if len(finite) == len(sizes) and adds_up(0, weights):
                # `cause` explains it if the split run is a sum of the shards with other weights.
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
            if kind == "log" and "whole batch" in self._causes:
                # A loss that is logged as well has its cause already.
                alone, eps = self._alone, self._eps
                keys = [key for key in keys if distance(alone.get(LOSS), alone.get(key), eps)]
            if not keys or kind in ("loss", "gradient"):
                continue
            if kind != "output":
                cause = "logged value" if kind == "log" else kind
                in_forward = kind == "buffer" and not self._call.reports_loss
                sentence = "buffer in forward" if in_forward else cause
                self._name(cause, _listed([key.name for key in keys]), sentence=sentence)
                continue
            sentence = "output" if self._call.reports_loss else "forward"
            self._name("output", _listed([f"output{key.name}" for key in keys]), sentence=sentence)
        if not self._causes.keys() - {*KNOWN}:
            self._name("replicas")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


# How closely


def gradient_norm(values: Values) -> float:
    """The norm of all gradients together."""
    gradients = [v for key, v in values.items() if key.kind == "gradient" and v is not None]
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def is_finite(values: Values) -> bool:
    """Whether the loss and all gradients are finite."""
    return math.isfinite(gradient_norm(values) + values.get(LOSS, 0.0))


def products(calls: Sequence[Values]) -> Tensor:
    """The products of the gradients of each call with those of each, as a square matrix.

    The loss is one more coordinate, with as much weight as the first call's gradients.
    """
    norm, loss = gradient_norm(calls[0]), calls[0].get(LOSS)
    scale = norm**2 / loss**2 if loss and norm else 1.0

    def product(a: Values, b: Values) -> float:
        total = scale * a.get(LOSS, 0.0) * b.get(LOSS, 0.0)
        for key, gradient in a.items():
            other = b.get(key)
            if key.kind == "gradient" and gradient is not None and other is not None:
                total += float(gradient.double().flatten() @ other.double().flatten())
        return float(total)

    return torch.tensor([[product(a, b) for b in calls] for a in calls], dtype=torch.float64)


def rounding(dtypes: Iterable[torch.dtype], device_type: str) -> float:
    """The relative rounding error of computations in these dtypes.

    It is larger on GPUs that compute products with 10 of float32's 23 bits (TF32).
    """
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    eps = max(torch.finfo(dtype).eps for dtype in floating or [torch.get_default_dtype()])
    cudnn: Any = torch.backends.cudnn
    kinds = cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul
    is_short = device_type == "cuda" and "tf32" in [kind.fp32_precision for kind in kinds]
    return max(eps, 1e-4) if is_short and eps > 1e-9 else eps


def differing(alone: Values, split: Values, eps: float) -> dict[Key, float]:
    """The keys under which two calls differ by more than rounding, with their `distance`."""
    rest = 10 * eps * gradient_norm(alone)  # a gradient that cancels to 0 is all rounding
    found = {}
    for key in {**alone, **split}:
        a, b = alone.get(key, UNCHANGED), split.get(key, UNCHANGED)
        found[key] = distance(a, b, eps, rest if key.kind == "gradient" else 0.0)
    return {key: apart for key, apart in found.items() if apart}


def distance(a: Any, b: Any, eps: float = 0.0, floor: float = 0.0) -> float:
    """How far `b` is off `a`, relative to the largest entry of `a`; inf if shapes or types differ.

    Returns 0 if the largest difference is at most sqrt(eps) times the largest entry of `a`, plus
    `floor`. Of containers it is the largest of their leaves.
    """
    places_a, places_b = tree.places(a), tree.places(b)
    if [path for path, _ in places_a] != [path for path, _ in places_b]:
        return math.inf
    pairs = zip(places_a, places_b, strict=True)
    return max((_leaves_apart(x, y, eps, floor) for (_, x), (_, y) in pairs), default=0.0)


def _leaves_apart(a: Any, b: Any, eps: float, floor: float) -> float:
    if a is b:
        return 0.0
    if isinstance(a, PackedSequence) and isinstance(b, PackedSequence):
        return max(_leaves_apart(x, y, eps, floor) for x, y in zip(a, b, strict=True))
    if not (_is_number(a) and _is_number(b)):
        # Objects without an `__eq__` cannot be compared: those of one class are taken as equal.
        equality: Any = type(a).__eq__
        is_opaque = type(a) is type(b) and equality is object.__eq__
        return 0.0 if is_opaque or tree.equal(a, b) else math.inf
    x, y = torch.as_tensor(a), torch.as_tensor(b)
    if x.shape != y.shape:
        return math.inf
    if any(t.layout is not torch.strided or t.is_nested or t.is_meta for t in (x, y)):
        return 0.0
    dtype = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(dtype), y.to(dtype)
    finite = x.isfinite()
    others = x[~finite], y[~finite]  # infinities and NaN have to be the same ones
    if not finite.equal(y.isfinite()) or not torch.allclose(*others, equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    off, scale = float((x - y)[finite].abs().max()), float(x[finite].abs().max())
    if off <= eps**0.5 * scale + floor:
        return 0.0
    return off / scale if scale else math.inf


def _is_number(value: Any) -> bool:
    """Whether it is a number, a tensor, or a NumPy array or scalar of numbers or truth values."""
    is_of_numbers = tree.is_array(value) and value.dtype.kind in "biufc"
    return is_of_numbers or isinstance(value, Tensor | float | int)
