"""Collectives over the replicas of all processes, inside and outside of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from support.processes import run_in_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallelStrategy
from lightning_dp.parallel.apply import collectives
from lightning_dp.parallel.split import even

BATCH = 25
EXACT = {"rtol": 0.0, "atol": 1e-10}
Trained = tuple[dict[str, Tensor], list[Tensor]]


def data(samples: int, width: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x), batch_size=BATCH)


class Net(LightningModule):
    """Keeps the losses of its steps."""

    def __init__(self, step: str) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.unused = nn.Linear(4, 3).double()
        self.losses: list[Tensor] = []
        self.step = STEPS[step]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, batch[0])

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


def nt_xent(z: Tensor) -> Tensor:
    """Each row's partner is the next one; all rows are compared with all."""
    unit = F.normalize(z, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (unit @ unit.T).masked_fill(itself, -30.0)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(1))


def contrastive(self: Net, x: Tensor) -> Tensor:
    return nt_xent(self.all_gather(self.net(x)))


def own_rows_against_all(self: Net, x: Tensor) -> Tensor:
    z = self.net(x)
    return (z @ self.all_gather(z, sync_grads=True).T).logsumexp(1).mean()


def tree_and_several(self: Net, x: Tensor) -> Tensor:
    """Crossings that depend on each other, and some that do not; one that nobody uses."""
    z = self.net(x)
    self.all_gather(self.unused(x))
    first = self.all_gather({"z": z, "of": [x, z.square()]})
    second = self.all_gather(z * first["z"].mean(0))
    third = self.all_gather(z.sin())
    rows = z @ first["of"][1].T
    return rows.logsumexp(1).mean() + (z * third.var(0, correction=0)).mean() + second.cos().mean()


def reduced(self: Net, x: Tensor) -> Tensor:
    z = self.net(x)
    strategy = self.trainer.strategy
    centre = strategy.reduce(z.mean(0))
    first = strategy.broadcast(self.all_gather(z))[:1]
    return ((z - centre) ** 2).mean() + (z * first).mean()


STEPS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    f.__name__: f for f in (contrastive, own_rows_against_all, tree_and_several, reduced)
}


def trained(step: str, devices: int, samples: int, **options: Any) -> Trained:
    """The parameters after a fit, and the losses; on one device where there are no devices."""
    module = Net(step)
    return fitted(module, devices, samples, **options), module.losses


def fitted(module: Net, devices: int, samples: int, **options: Any) -> dict[str, Tensor]:
    trainer = Trainer(
        accelerator="cpu",
        devices=max(devices, 1),
        strategy=DataParallelStrategy(**options) if devices else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(samples))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# What they give


SEEN: list[Any] = []
"""What replicas have noted, each for itself: lists on the module would be joined."""


class Asks(LightningModule):
    """Notes what the collectives give: in every validation step, and in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, Any] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        SEEN.append(asked(self, x))
        return x

    def on_validation_batch_end(self, outputs: Tensor, batch: Any, batch_idx: int) -> None:
        self.noted[f"batch {batch_idx}"] = self.all_gather(batch[0])

    def on_validation_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        rank = self.trainer.global_rank
        own = torch.full((1 + rank, 2), float(rank))
        self.noted |= {
            "gather": self.all_gather({"rows": own, "number": own.mean()}),
            "mean": strategy.reduce(torch.tensor(float(rank))),
            "sum": strategy.reduce(torch.tensor([rank]), reduce_op="sum"),
            "max": strategy.reduce(torch.tensor([rank]), reduce_op="max"),
            "broadcast": strategy.broadcast({"rank": rank}, 1),
            "any": strategy.reduce_boolean_decision(rank == 1, all=False),
            "all": strategy.reduce_boolean_decision(rank == 1),
        }
        strategy.barrier("in a hook")


def asked(self: LightningModule, x: Tensor) -> dict[str, Any]:
    strategy = self.trainer.strategy
    strategy.barrier("in a step")
    n, own = len(x), x.mean(0)
    return {
        "rows": self.all_gather(x),
        "tree": self.all_gather({"first": x[:, 0], "rest": [x[:, 1:], x[:, 0].mean()]}),
        "counts": self.all_gather(torch.tensor(n)),
        "mean of gather": self.all_gather(x.mean()),
        **{op: strategy.reduce(own, reduce_op=op) for op in ("mean", "sum", "min", "max")},
        "product": strategy.reduce(own, reduce_op=torch.distributed.ReduceOp.PRODUCT),
        "total": strategy.reduce(torch.tensor(n), reduce_op="sum"),
        "first": strategy.broadcast({"x": x, "n": n}),
        "last": strategy.broadcast((x, n), strategy.reduce(torch.tensor(1), reduce_op="sum") - 1),
        "all": strategy.reduce_boolean_decision(n > 1),
        "any": strategy.reduce_boolean_decision(n > 1, all=False),
    }


def expected(parts: list[Tensor]) -> dict[str, Any]:
    """What these give, where each replica has one of these parts of a batch."""
    x, means = torch.cat(parts), torch.stack([part.mean(0) for part in parts])
    n = [len(part) for part in parts]
    return {
        "rows": x,
        "tree": {"first": x[:, 0], "rest": [x[:, 1:], x[:, 0].mean()]},
        "counts": torch.tensor(sum(n)),
        "mean of gather": x.mean(),
        "mean": x.mean(0),
        "sum": means.sum(0),
        "min": means.amin(0),
        "max": means.amax(0),
        "product": means.prod(0),
        "total": torch.tensor(sum(n)),
        "first": {"x": parts[0], "n": n[0]},
        "last": (parts[-1], n[-1]),
        "all": min(n) > 1,
        "any": max(n) > 1,
    }


def asks(devices: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    module = Asks()
    SEEN.clear()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DataParallelStrategy(check_first_step=False, **options),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(module, DataLoader(data(6).dataset, batch_size=5), verbose=False)
    return SEEN.copy(), module.noted


# Who does not come


class Lost(Asks):
    """Processes, and replicas, that are not where the others are."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank = self.trainer.global_rank
        for call in (
            lambda: self.trainer.strategy.barrier("mine" if rank else "yours"),
            lambda: self.trainer.strategy.reduce(batch[0]),
            lambda: collectives.all_gather([1] if rank else {"a": 1}),
            lambda: self.trainer.strategy.broadcast(1, 4),
        ):
            try:
                call()
            except Exception as error:
                notes = getattr(error, "__notes__", ())
                SEEN.append(" ".join([type(error).__name__, *map(str, error.args), *notes]))


def lost() -> list[str]:
    module = Lost()
    SEEN.clear()
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy(), **options)
    trainer.validate(module, DataLoader(data(5).dataset, batch_size=5), verbose=False)
    return SEEN.copy()


def everything(devices: int, samples: int, executor: str) -> dict[str, Any]:
    """All of it in one start of the processes; on one device where there are no devices."""
    found: dict[str, Any] = {
        step: trained(step, devices, samples, **({"executor": executor} if devices else {}))
        for step in STEPS
    }
    if devices:
        found["asked"], found["lost"] = asks(devices, executor=executor), lost()
    return found


def assert_right(found: list[dict[str, Any]], devices: int, samples: int) -> None:
    """In every one of the processes."""
    one = everything(0, samples, "auto")
    x, processes = data(6).dataset[:][0], len(found)
    sizes = even(5, devices)
    own = [torch.full((1 + rank, 2), float(rank)) for rank in range(processes)]
    last, ranks = processes - 1, list(range(processes))
    in_hooks = {
        "batch 0": x[:5],
        "batch 1": x[5:],  # of which only the first process has anything
        "gather": {"rows": torch.cat(own), "number": torch.tensor(sum(ranks) / processes)},
        "mean": torch.tensor(sum(ranks) / processes),
        "sum": torch.tensor([sum(ranks)]),
        "max": torch.tensor([last]),
        "broadcast": {"rank": 1},
        "any": True,
        "all": False,
    }
    parts = [part for part in x[:5].split(sizes) if len(part)]
    steps = [expected(parts)] * (devices // processes) + [expected([x[5:]])]
    for process in found:
        barrier, reduce, gather, broadcast = process.pop("lost")
        assert "ProcessesApartError" in barrier
        assert "process 0 is at barrier 'yours', process 1 is at barrier 'mine'" in barrier
        assert "tensors of one shape to reduce, got [(" in reduce
        assert "GatherError" in gather
        assert "expected src from 0 to " in broadcast
        seen, noted = process.pop("asked")
        torch.testing.assert_close(seen, steps, **EXACT)
        torch.testing.assert_close(noted, in_hooks, **EXACT)
        for name, value in process.items():
            torch.testing.assert_close(value, one[name], msg=lambda m, n=name: f"{n}: {m}", **EXACT)


def test_collectives_in_two_processes() -> None:
    assert_right(run_in_processes(everything, 2, 4, 51, "threads"), 4, 51)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "samples", "executor"), [(2, 53, "inorder")])
def test_any_number_of_devices(devices: int, samples: int, executor: str) -> None:
    assert_right(run_in_processes(everything, 2, devices, samples, executor), devices, samples)
