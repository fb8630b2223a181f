"""Promises that are broken on purpose, one at a time, and the tests that notice.

    python tests/mutants.py                  # all
    python tests/mutants.py --stage reduce   # those of one stage
    python tests/mutants.py --only NAME      # one, with or without its stage
    python tests/mutants.py --list

A mutant is a small change of the package by name: a text that stands once in a function is
replaced. It is made in a copy, in which the tests of its stage run until the first one fails. A
mutant that no test notices is a promise that no test holds. A text that is not found any more is an
error: after a rewrite the mutant is aimed anew.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 240
"""After so long a run of tests hangs, which is noticed as well."""
SHARE = 0.95
"""Of all mutants at least so many are noticed."""

SAME = "tests/same_numbers/test_same_numbers.py"
TESTS = {
    "split": ("tests/splitting/test_split.py",),
    "scatter": ("tests/batches",),
    "replicate": ("tests/replicas", "tests/same_numbers/test_trainer_options.py"),
    "apply": ("tests/apply", "tests/drop_in"),
    "gather": ("tests/batches/test_gather.py", "tests/reduce/test_training_step.py", SAME),
    "reduce": ("tests/reduce", "tests/same_numbers/test_unusual_modules.py", SAME),
    "comm": ("tests/comm",),
    "step": ("tests/faults/test_out_of_memory.py", "tests/same_numbers/test_trainer_options.py"),
    "logs": ("tests/metrics/test_logged_values.py",),
    "metrics": ("tests/metrics",),
    "state": ("tests/state",),
    "processes": ("tests/processes/test_one_device.py",),
    "checkpoints": ("tests/checkpointing",),
    "forward": ("tests/forward", "tests/drop_in"),
}
"""The tests that notice mutants of a stage, as pytest takes them."""


class Mutant(NamedTuple):
    """One promise broken.

    Attributes:
        where: module and qualified name of a function or class, `a.b:C.f`.
        old: a text that stands once in it.
        new: what stands there instead.
        promise: what users are promised.
        first: tests that are run before those of its stage, where these notice late or not.
    """

    where: str
    old: str
    new: str
    promise: str
    first: tuple[str, ...] = ()


def _of(module: str) -> str:
    return f"lightning_dp.parallel.{module}"


MUTANTS = {
    "split/even-loses-rest": Mutant(
        _of("split.planner:even"),
        "(share + 1,) * rest + (share,) * (k - rest)",
        "(share,) * k",
        "no sample of an uneven batch is dropped",
    ),
    "split/weighted-by-floor": Mutant(
        _of("split.planner:weighted"),
        "for i in by_remainder[: n - sum(sizes)]:",
        "for i in by_remainder[: n - sum(sizes) - 1]:",
        "fixed shares use every sample",
    ),
    "split/minimax-ignores-fixed": Mutant(
        _of("split.optimal:minimax"),
        "lines = list(zip(fixed, per_sample, limits, strict=True))",
        "lines = list(zip([0.0] * len(fixed), per_sample, limits, strict=True))",
        "a device with a fixed cost gets fewer samples",
    ),
    "split/costs-ignored": Mutant(
        _of("split.optimal:by_cost"),
        "torch.as_tensor(costs, dtype=torch.float64)",
        "torch.ones(len(costs), dtype=torch.float64)",
        "costly samples are shared out evenly",
    ),
    "split/caps-not-recorded": Mutant(
        _of("split.planner:Planner.record_oom"),
        "caps[k] = sizes[k] - max(1, sizes[k] // 8)",
        "pass",
        "a device that ran out of memory gets fewer samples",
    ),
    "scatter/wrong-size-accepted": Mutant(
        _of("scatter.shards:cut"),
        "if min(sizes) < 0 or n not in (None, sum(sizes)):",
        "if False:",
        "sizes that do not fit the batch are refused",
    ),
    "scatter/shards-overlap": Mutant(
        _of("scatter.tree:_cut_tensor"),
        "leaf.narrow(dim, stop - size, size)",
        "leaf.narrow(dim, 0, size)",
        "each sample goes to one replica, in order",
    ),
    "scatter/columns-of-other-lengths": Mutant(
        _of("scatter.shards:infer_for"),
        "if len(sizes) == 1:",
        "if sizes:",
        "two lengths in one batch are refused",
    ),
    "scatter/split-batch-ignored": Mutant(
        _of("scatter.shards:cut_for"),
        'split_batch = getattr(module, "split_batch", None)',
        "split_batch = None",
        "a module cuts its batches itself if it can",
    ),
    "replicate/resync-left-out": Mutant(
        _of("engine:Engine.resync"),
        "self.replicas.mark_stale()",
        "pass",
        "weights that a callback writes through .data reach the replicas",
    ),
    "replicate/versions-not-compared": Mutant(
        _of("replicate.replicas:Replica.follow"),
        "written = _differences(state.versions, seen.versions)",
        "written = set()",
        "weights that an optimizer writes reach the replicas",
    ),
    "replicate/thawed-not-sent": Mutant(
        _of("replicate.replicas:Replica.follow"),
        "stale = bound | written | toggled",
        "stale = bound | written",
        "weights that were frozen are sent when they are trained",
    ),
    "replicate/structure-not-followed": Mutant(
        _of("replicate.structure:ModuleStructure.__init__"),
        "bound += map(child_table, self.modules)",
        "bound += ()",
        "a layer that is replaced is replaced on the replicas",
    ),
    "replicate/attributes-not-followed": Mutant(
        _of("replicate.replicas:Replicas._have_other_attributes"),
        "self._attributes.differ()",
        "False",
        "attributes that hooks set reach the replicas",
    ),
    "replicate/parameter-attributes-lost": Mutant(
        _of("replicate.structure:ModuleStructure.__init__"),
        "[*self.modules, *self.parameters]",
        "[*self.modules]",
        "attributes of a parameter are there on replicas",
    ),
    "replicate/frozen-on-replicas-trained": Mutant(
        _of("replicate.replicas:_leaf"),
        "requires_grad=root.requires_grad",
        "requires_grad=True",
        "a frozen parameter has no gradient",
    ),
    "replicate/buffers-not-sent": Mutant(
        _of("reduce.reducer:Reducer.begin_step"),
        'return "read" if self._root_keeps_its_buffers(shards) else "all"',
        'return "changed"',
        "replicas read the root's buffers",
    ),
    "apply/autocast-dtype-lost": Mutant(
        _of("apply.worker:ThreadState.__init__"),
        "partial(torch.autocast, kind, dtype, cache_enabled=caches)",
        "partial(torch.autocast, kind, cache_enabled=caches)",
        "replicas compute in the autocast dtype of the caller",
    ),
    "apply/inference-mode-lost": Mutant(
        _of("apply.worker:ThreadState.__init__"),
        "partial(torch.inference_mode, torch.is_inference_mode_enabled()),",
        "",
        "inference mode is on in every replica",
    ),
    "apply/grad-mode-lost": Mutant(
        _of("apply.executor:Calls._work"),
        "torch.set_grad_enabled(self._grad)",
        "torch.set_grad_enabled(True)",
        "no graph is made where gradients are off",
    ),
    "apply/default-device-is-roots": Mutant(
        _of("apply.worker:ThreadState._default_device_on"),
        "default = device if self._default == self._root else self._default",
        "default = self._default",
        "torch.zeros(3) in a replica is on its device",
    ),
    "apply/context-variables-lost": Mutant(
        _of("apply.executor:Calls._run_until_all_stop"),
        "partial(self._context.copy().run, self._work, task)",
        "partial(self._work, task)",
        "context variables of the caller are seen in replicas",
    ),
    "apply/error-swallowed": Mutant(
        _of("apply.executor:Calls.close"),
        "tasks, error = self.participants, self._first_error()",
        "tasks, error = self.participants, self.broken",
        "an exception of a replica reaches the caller",
        ("tests/faults/test_faults.py",),
    ),
    "apply/others-not-stopped": Mutant(
        _of("apply.executor:Calls.run"),
        "if task.error is not None or self.broken is not None:",
        "if False:",
        "an exception stops the replicas behind it",
    ),
    "apply/note-without-samples": Mutant(
        _of("scatter.shards:Shards.place"),
        'return f", {stage}, samples {start} to {last} of {sum(self.sizes)}"',
        'return f", {stage}"',
        "an error names replica, device, stage and samples",
        ("tests/faults/test_faults.py",),
    ),
    "apply/all-gather-in-wrong-order": Mutant(
        _of("apply.collectives:all_gather"),
        "gather(values, device,",
        "gather(values[::-1], device,",
        "all_gather gives the batch in order",
    ),
    "apply/reduce-unweighted": Mutant(
        _of("apply.collectives:reduced"),
        "return weighted_mean(exact, list(map(float, sizes)))",
        "return weighted_mean(exact, [1.0] * len(exact))",
        "a reduced mean is that of the batch",
    ),
    "apply/sync-bn-unweighted": Mutant(
        _of("apply.sync_batch_norm:_merged"),
        "[[n / total] for n, _, _ in moments]",
        "[[1 / len(moments)] for n, _, _ in moments]",
        "synced statistics are those of the batch",
    ),
    "apply/sync-bn-between-lost": Mutant(
        _of("apply.sync_batch_norm:_merged"),
        "(variances + (means - mean).square())",
        "variances",
        "synced variances are those of the batch",
    ),
    "apply/sync-bn-biased": Mutant(
        _of("apply.sync_batch_norm:_track"),
        "unbiased = var * (n / (n - 1))",
        "unbiased = var",
        "running variances are unbiased, as batch norm's",
    ),
    "apply/sync-bn-no-gradient-of-mean": Mutant(
        _of("apply.sync_batch_norm:forward"),
        "(x.numel() // x.size(1), shard_mean,",
        "(x.numel() // x.size(1), shard_mean.detach(),",
        "gradients pass through the synced mean",
    ),
    "apply/one-sample-for-batch-norm": Mutant(
        _of("apply.sync_batch_norm:fewest_samples"),
        "return 1 + refuses_one",
        "return 1",
        "a replica with batch norm gets two samples",
        ("tests/splitting/test_batch_norm.py",),
    ),
    "gather/loss-of-equal-weights": Mutant(
        _of("step:loss_weights"),
        "return [count / total for count in counts]",
        "return [1 / len(counts)] * len(counts)",
        "the loss of an uneven batch is weighted by samples",
    ),
    "gather/items-ignored": Mutant(
        _of("step:loss_weights"),
        "counts = num_items if num_items is not None and any(num_items) else sizes",
        "counts = sizes",
        "a loss with num_items is weighted by them",
    ),
    "gather/sum-as-mean": Mutant(
        _of("step:loss_weights"),
        'if reduction == "sum":',
        "if False:",
        "losses that are sums are added up",
    ),
    "gather/nan-of-nothing-counts": Mutant(
        _of("step:join_losses"),
        "if weight:",
        "if True:",
        "a replica without items contributes nothing, even if its loss is NaN",
    ),
    "gather/loss-without-last": Mutant(
        _of("step:join_losses"),
        "joint.add(value, alpha=weight)",
        "joint",
        "every replica's loss is in the joint one",
    ),
    "gather/scalars-unweighted": Mutant(
        _of("scatter.shards:weighted_mean"),
        "total = float(sum(weights))",
        "weights = [1.0] * len(weights)\n    total = float(len(weights))",
        "numbers in outputs are averaged by samples",
    ),
    "gather/integers-averaged": Mutant(
        _of("gather.gather:_sum"),
        "return stacked.sum(0, dtype=None if stacked.dtype is torch.bool else stacked.dtype)",
        "return stacked.float().mean(0).to(stacked.dtype)",
        "whole numbers in outputs are added up",
    ),
    "gather/rows-reversed": Mutant(
        _of("gather.gather:Join._rows"),
        ".join(leaves, dim)",
        ".join(leaves[::-1], dim)",
        "rows of outputs are in the batch's order",
    ),
    "gather/overrides-ignored": Mutant(
        _of("gather.gather:override_at"),
        "if overrides else None",
        "if False else None",
        "gather_overrides say how outputs are joined",
    ),
    "reduce/gradients-averaged": Mutant(
        _of("reduce.reducer:JointBackward.tasks"),
        "gradient * weight",
        "gradient / len(self.parts)",
        "gradients are those of the batch's loss",
    ),
    "reduce/gradients-not-cleared": Mutant(
        _of("reduce.reducer:reduce_gradients"),
        "clear_gradients(replica)",
        "pass",
        "gradients of a step are not added to the next one's",
    ),
    "reduce/unused-gets-zero": Mutant(
        _of("reduce.reducer:reduce_gradients"),
        "sums = list(before)",
        "sums = [torch.zeros_like(p) if s is None else s for p, s in zip(root, before)]",
        "a parameter that no replica used keeps the gradient None",
    ),
    "reduce/only-in-others-lost": Mutant(
        _of("reduce.reducer:_add"),
        "sums[i] = gradient",
        "pass",
        "a parameter that another replica alone used has its gradient",
    ),
    "reduce/hooks-on-shards": Mutant(
        _of("reduce.reducer:Backward.__init__"),
        "SuspendedHooks(root) if hooked(root) else None",
        "None",
        "hooks of parameters see the sums, once",
    ),
    "reduce/earlier-gradients-lost": Mutant(
        _of("reduce.reducer:StashedGradients.add"),
        "parameter.grad = earlier",
        "pass",
        "gradients accumulate over backwards",
        ("tests/faults/test_out_of_memory.py",),
    ),
    "reduce/not-put-aside": Mutant(
        _of("reduce.reducer:Backward.__init__"),
        "if can_be_undone or self._hooks or world is not None:",
        "if self._hooks or world is not None:",
        "a backward that is run again adds its gradients once",
        ("tests/faults/test_out_of_memory.py",),
    ),
    "reduce/buffers-of-the-last": Mutant(
        _of("reduce.buffers:reduce_buffers"),
        "value = values[0]",
        "value = values[-1]",
        "the first replica's buffers stay",
        ("tests/replicas/test_latest_weights.py",),
    ),
    "reduce/buffers-mean-unweighted": Mutant(
        _of("reduce.buffers:reduce_buffers"),
        "weights = [n / sum(sizes) for n in sizes]",
        "weights = [1 / len(sizes) for n in sizes]",
        'buffers="mean" is weighted by samples',
        ("tests/state/test_state.py",),
    ),
    "reduce/second-derivative-silent": Mutant(
        _of("reduce.reducer:_JointLoss.backward"),
        "if torch.is_grad_enabled():",
        "if False:",
        "create_graph=True on the joint loss is refused",
    ),
    "comm/host-does-not-wait": Mutant(
        _of("comm.buckets:to_device_coalesced"),
        "synchronize(*[d for i in away if (d := tensors[i].device) not in later])",
        "pass",
        "values on the host are there when they are read",
    ),
    "comm/memory-order-lost": Mutant(
        _of("comm.buckets:Bucket.in_memory"),
        "flat.data.as_strided(like.shape, like.stride(), start)",
        "flat.data[start : start + like.numel()].view(like.shape)",
        "channels_last stays on the way",
    ),
    "comm/arrival-not-awaited": Mutant(
        _of("comm.streams:wait_for_copies"),
        'current_stream(device).wait_stream(copy_stream(device, "arriving"))',
        "pass",
        "parameters are read when they have arrived",
    ),
    "comm/outputs-not-awaited": Mutant(
        _of("engine:Engine.apply"),
        "synchronize(*self.devices)",
        "pass",
        "outputs on the CPU are there when they are read",
    ),
    "step/validation-without-resync": Mutant(
        "lightning_dp.strategy:DataParallelMixin.on_validation_end",
        "self._resync()",
        "pass",
        "weights that callbacks swap around validation reach the replicas",
        ("tests/replicas/test_latest_weights.py",),
    ),
    "step/evaluation-with-old-weights": Mutant(
        "lightning_dp.strategy:DataParallelMixin._step",
        "rest[:1] in ([], [0])",
        "rest[:1] in ([], [1])",
        "weights that callbacks swap in before an evaluation reach the replicas",
        ("tests/replicas/test_latest_weights.py",),
    ),
    "step/scaled-loss-elsewhere": Mutant(
        "lightning_dp.modes:Mode.to_be_scaled",
        'return loss.to(root, non_blocking=True) if loss.device.type == "cpu" else loss',
        "return loss",
        "a gradient scaler reads inf on the devices",
        ("tests/comm/test_values_on_the_host.py",),
    ),
    "step/rerun-leaves-traces": Mutant(
        _of("engine:Engine.rerun"),
        "replaced(self, is_rerun=True)",
        "replaced(self, is_rerun=False)",
        "a step that runs again logs once",
    ),
    "step/undo-keeps-gradients": Mutant(
        _of("reduce.reducer:Backward.abort"),
        "self._earlier.put_back()",
        "pass",
        "a step that runs again adds its gradients once",
    ),
    "logs/logs-unweighted": Mutant(
        "lightning_dp.recording:merged_log",
        "value = _reduced(how, numbers, weights)",
        "value = _reduced(how, numbers, [1] * len(numbers))",
        "logged means are weighted by samples",
    ),
    "logs/own-batch-size-ignored": Mutant(
        "lightning_dp.recording:_own_weights",
        'if first.get("batch_size") is None:',
        "if True:",
        "logged means are weighted by their own batch_size",
    ),
    "logs/constant-of-few-replicas": Mutant(
        "lightning_dp.recording:_own_weights",
        "count if known and sum(sizes) < count else len(own)",
        "len(own)",
        "a batch with fewer samples than replicas weighs as much as others, if batch_size says so",
        ("tests/processes/test_logs.py",),
    ),
    "logs/constant-batch-size-weighs": Mutant(
        "lightning_dp.recording:_own_weights",
        'return {**first, "batch_size": own[0] * shards}, sizes',
        'return {**first, "batch_size": own[0] * shards}, own',
        "a batch_size that is one constant does not weigh uneven shards alike",
    ),
    "logs/sum-logged-as-mean": Mutant(
        "lightning_dp.recording:_reduced",
        "if how in _REDUCTIONS:",
        'if how in _REDUCTIONS and how != "sum":',
        'reduce_fx="sum" adds up',
    ),
    "logs/nan-of-nothing-logged": Mutant(
        "lightning_dp.recording:_reduced",
        "if 0 in weights:",
        "if False:",
        "a logged mean over nothing counts for nothing",
    ),
    "logs/missing-key-silent": Mutant(
        "lightning_dp.recording:StepRecorder._log",
        "if len(row) < len(found.replicas):",
        "if False:",
        "a key that some replicas lack is an error",
    ),
    "metrics/arguments-reversed": Mutant(
        "lightning_dp.recording:_JoinArguments._tensors",
        "torch.cat(tensors, dim)",
        "torch.cat(tensors[::-1], dim)",
        "metrics see the batch in order",
    ),
    "metrics/mean-argument-unweighted": Mutant(
        "lightning_dp.recording:_JoinArguments.leaves",
        "_reduced(self.numbers, numbers, self.sizes)",
        "_reduced(self.numbers, numbers, [1] * len(numbers))",
        "a mean that a metric takes is the batch's",
    ),
    "metrics/value-of-shards-logged": Mutant(
        "lightning_dp.recording:StepRecorder._log",
        "if source.leaf < len(of_batch):",
        "if False:",
        "a logged value that a metric returned is that of the whole batch",
    ),
    "metrics/stale-copy": Mutant(
        "lightning_dp.recording:RecordedMetric._reset_copy",
        "all(map(is_, now, self._copied))",
        "True",
        "a metric's attributes that hooks set count in the next step",
    ),
    "metrics/metric-reset-lost": Mutant(
        "lightning_dp.recording:RecordedMetric.reset",
        'self._append("reset", (), {})',
        "pass",
        "a metric that a step resets is reset",
    ),
    "state/items-of-first-alone": Mutant(
        "lightning_dp.module_state:Merge._list",
        "root.extend(self._joined(path, tails))",
        "root.extend(tails[0])",
        "items that all replicas append are joined",
    ),
    "state/uneven-items-forgotten": Mutant(
        "lightning_dp.module_state:Merge._belong_to_samples",
        "self._uneven.add(path)",
        "return True",
        "items of samples follow each other in every step, also where counts are equal by chance",
    ),
    "state/items-of-idle-ranks-kept": Mutant(
        "lightning_dp.recording:StepRecorder.around",
        "keeps_items=not is_idle",
        "keeps_items=True",
        "a process without samples of a batch keeps nothing of it",
        ("tests/processes/test_hooks.py",),
    ),
    "processes/idle-ranks-count": Mutant(
        _of("processes:exchange_losses"),
        "0 if world.is_idle else samples",
        "samples",
        "a process without samples of a batch adds nothing to its loss",
    ),
    "checkpoints/wrappers-saved": Mutant(
        "lightning_dp.checkpointing.io:ModulePrefixMixin.save_checkpoint",
        'if self.on_save != "keep":',
        "if False:",
        "checkpoints have clean keys",
    ),
    "checkpoints/written-in-place": Mutant(
        "lightning_dp.checkpointing.files:write",
        'target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")',
        "target",
        "a save that fails leaves the old file",
    ),
    "state/different-values-silent": Mutant(
        "lightning_dp.module_state:Merge._entry",
        "if not all(_agree(",
        "if False and not all(_agree(",
        "an attribute that replicas bind to other values is named",
    ),
    "forward/spread-forever": Mutant(
        _of("forward:ForwardParallel._stop_spreading"),
        "self._spread.close()",
        "self.kept = self._spread",
        "after a step the module calls its own forward",
    ),
    "forward/trained-weights-kept": Mutant(
        _of("forward:_after_backward"),
        "living.replicas.mark_stale(trained_only=True)",
        "pass",
        "weights written through .data between calls are seen",
    ),
}


def source_of(where: str, root: Path = ROOT) -> tuple[Path, str, str]:
    """The file, its text, and the text of the function or class in it that `where` names."""
    module, _, names = where.partition(":")
    file = root.joinpath(*module.split(".")).with_suffix(".py")
    text = file.read_text()
    node: ast.AST = ast.parse(text)
    for name in names.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [n for n in ast.walk(node) if isinstance(n, kinds) and n.name == name]
        if len(found) != 1:
            raise LookupError(f"{where}: expected one {name}, got {len(found)}")
        node = found[0]
    source = ast.get_source_segment(text, node)
    assert source is not None
    return file, text, source


def mutated(mutant: Mutant, root: Path = ROOT) -> tuple[Path, str]:
    """The file that a mutant changes, and its text with the change."""
    file, text, source = source_of(mutant.where, root)
    if source.count(mutant.old) != 1 or text.count(source) != 1:
        raise LookupError(
            f"Expected {mutant.old!r} once in {mutant.where}, got it {source.count(mutant.old)} "
            "times. Aim the mutant at what does this now."
        )
    return file, text.replace(source, source.replace(mutant.old, mutant.new))


def tests_of(name: str) -> tuple[str, ...]:
    return (*MUTANTS[name].first, *TESTS[name.partition("/")[0]])


def run(name: str) -> tuple[str, str, float]:
    """What became of a mutant, by which test, and in how many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.so", "shared")
        )
        file, text = mutated(MUTANTS[name], copy)
        file.write_text(text)
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
        process = subprocess.Popen(
            [*command, "--no-header", "--tb=no", *tests_of(name)],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "killed", "hangs", time.monotonic() - started
        seconds = time.monotonic() - started
    if process.returncode == 0:
        return "SURVIVED", "", seconds
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.M)
    if failed is None:
        return "BROKEN", textwrap.shorten(printed[-300:], 200), seconds
    return "killed", failed[1], seconds


def select(stage: str | None, only: Collection[str]) -> dict[str, Mutant]:
    """Those of a stage, of these names; the stage in front of a name may be left out."""
    known = {given: name for name in MUTANTS for given in (name, name.partition("/")[2])}
    if unknown := set(only) - set(known):
        raise SystemExit(f"--only: expected names from --list, got {sorted(unknown)}.")
    names = [known[given] for given in only] or list(MUTANTS)
    return {n: MUTANTS[n] for n in names if stage in (None, n.partition("/")[0])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", choices=sorted({name.partition("/")[0] for name in MUTANTS}))
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    found = select(options.stage, options.only)
    if options.list:
        print(*(f"{name:38} {mutant.promise}" for name, mutant in found.items()), sep="\n")
        return 0
    killed = 0
    for name in found:
        result, test, seconds = run(name)
        killed += result == "killed"
        print(f"{name:38} {result:9} {seconds:5.0f} s  {test}", flush=True)
    print(f"{killed} of {len(found)} killed ({killed / max(len(found), 1):.0%})")
    return 0 if killed >= SHARE * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
