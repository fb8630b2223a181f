"""Small models of many kinds, for tests that compare several devices with one.

Every family is a LightningModule with a `backbone` and a `head`, so that options such as finetuning
can be tried on all of them. None draws random numbers in its steps: what a family needs of them is
in its samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, default_collate

SAMPLES, BATCH = 22, 10  # 10, 10 and a last batch of 2: fewer samples than 3 devices
CLASSES = 3


class Family(LightningModule):
    """Trains, validates, tests and predicts; a family says what its layers and its losses are."""

    mode = "step"
    lr = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.prepare()

    def prepare(self) -> None:
        """Makes the layers; an option may do it later."""
        torch.manual_seed(1)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        """One sample: features and a class."""
        return torch.randn(6, generator=g), i % CLASSES

    @classmethod
    def collate(cls, samples: list[Any]) -> Any:
        return default_collate(samples)

    @classmethod
    def loader(cls) -> DataLoader[Any]:
        g = torch.Generator().manual_seed(0)
        samples: Any = [cls.sample(g, i) for i in range(SAMPLES)]
        return DataLoader(samples, BATCH, collate_fn=cls.collate)

    def outputs(self, batch: Any) -> Any:
        """What the model says of a batch: in forward mode the call that is spread."""
        return self(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def num_items(self, batch: Any) -> int | None:
        """What the loss is a mean over, if not over samples."""
        return None

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def sample_cost(self, batch: Any) -> Tensor:
        """For `split="cost"`: costs of all kinds, that put the samples in another order."""
        # In forward mode it is asked about the arguments of a call.
        n = self.count(batch) if self.mode == "step" else len(batch[0])
        return 1 + torch.arange(n) * 7 % 5

    def extras(self, stage: str, outputs: Any, batch: Any) -> None:
        """What a family logs and measures besides its loss."""

    def step(self, stage: str, batch: Any) -> Any:
        outputs = self.outputs(batch)
        loss, items = self.loss(outputs, batch), self.num_items(batch)
        every_step = stage == "train"
        size = self.count(batch) if items is None else items
        self.log(f"{stage}/loss", loss, on_step=every_step, on_epoch=True, batch_size=size)
        self.extras(stage, outputs, batch)
        return loss if items is None else {"loss": loss, "num_items": items}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.outputs(batch)

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trained(), self.lr)


def accuracy() -> torchmetrics.Metric:
    return torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)


class Perceptron(Family):
    """Residual layers, layer norm, accuracy."""

    def build(self) -> None:
        self.first = nn.Linear(6, 8)
        self.backbone = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)
        stages = ("train_", "val_", "test_")
        self.acc = nn.ModuleDict({stage: accuracy() for stage in stages})

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h + self.backbone(h))

    def extras(self, stage: str, outputs: Any, batch: Any) -> None:
        metric = self.acc[f"{stage}_"]
        metric(outputs, batch[1])
        self.log(f"{stage}/acc", metric, on_epoch=True, batch_size=self.count(batch))


class Convolutional(Family):
    """Convolutions with group norm, on images."""

    def build(self) -> None:
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6, CLASSES))

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        return torch.randn(1, 6, 6, generator=g), i % CLASSES

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Recurrent(Family):
    """A GRU over packed sequences, and an LSTM over what it returns."""

    def build(self) -> None:
        self.backbone = nn.GRU(3, 6, batch_first=True)
        self.lstm = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, CLASSES)

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        length = int(torch.randint(1, 6, (), generator=g))
        return {"x": torch.randn(5, 3, generator=g), "length": length, "y": i % CLASSES}

    def count(self, batch: Any) -> int:
        return len(batch["y"])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.backbone(packed)[0], True, total_length=x.shape[1])
        return self.head(self.lstm(states)[0].mean(1))

    def outputs(self, batch: Any) -> Any:
        return self(batch["x"], batch["length"])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch["y"])


class Language(Family):
    """A language model whose output layer is its embedding; the loss is a mean over tokens."""

    vocabulary = 11

    def build(self) -> None:
        self.embedding = nn.Embedding(self.vocabulary, 6, padding_idx=0)
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.head = nn.Linear(6, self.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        tokens = torch.randint(1, Language.vocabulary, (8,), generator=g)
        return tokens * (torch.arange(8) < 2 + i * 5 % 7)  # 0 is padding

    def count(self, batch: Any) -> int:
        return len(batch)

    def num_items(self, batch: Any) -> int:
        return int((batch[:, 1:] > 0).sum())

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.head(h + self.backbone(h))

    def outputs(self, batch: Any) -> Any:
        return self(batch[:, :-1])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


class Transformer(Family):
    """Attention under a padding mask."""

    def build(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(9, 8)
        self.backbone = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        tokens = torch.randint(1, 9, (6,), generator=g) * (torch.arange(6) < 1 + i % 6)
        return tokens, i % CLASSES

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.backbone(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(h[:, 0])


class Autoencoder(Family):
    """Outputs as large as the inputs."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ELU())
        self.head = nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1)

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        return torch.randn(2, 6, 6, generator=g)

    def count(self, batch: Any) -> int:
        return len(batch)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def outputs(self, batch: Any) -> Any:
        return self(batch)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch)

    def extras(self, stage: str, outputs: Any, batch: Any) -> None:
        error = (outputs - batch).abs()
        options: dict[str, Any] = {"on_epoch": True, "batch_size": len(batch)}
        self.log(f"{stage}/worst", error.max(), reduce_fx="max", **options)


class Graph(Family):
    """Graphs of unequal size, in lists: nobody pads them."""

    def build(self) -> None:
        self.backbone = nn.ModuleList([nn.Linear(3, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, CLASSES)

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        n = 2 + i % 4
        edges = torch.randint(0, 2, (n, n), generator=g)
        return {"nodes": torch.randn(n, 3, generator=g), "edges": edges, "y": i % CLASSES}

    @classmethod
    def collate(cls, samples: list[Any]) -> Any:
        nodes, edges = ([s[key] for s in samples] for key in ("nodes", "edges"))
        return {"nodes": nodes, "edges": edges, "y": torch.tensor([s["y"] for s in samples])}

    def count(self, batch: Any) -> int:
        return len(batch["y"])

    def forward(self, nodes: list[Tensor], edges: list[Tensor]) -> Tensor:
        read = []
        for h, a in zip(nodes, edges, strict=True):
            for layer in self.backbone:
                h = torch.tanh(layer(h) + a.to(h.dtype) @ layer(h))
            read.append(h.mean(0))
        return self.head(torch.stack(read))

    def outputs(self, batch: Any) -> Any:
        return self(batch["nodes"], batch["edges"])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch["y"])


class MultiTask(Family):
    """Nested dicts in and out, a loss for each task, and weights of the losses that are learnt."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
        self.head = nn.ModuleDict({"kind": nn.Linear(8, CLASSES), "value": nn.Linear(8, 1)})
        self.scales = nn.Parameter(torch.zeros(2))

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        inputs = {"x": torch.randn(6, generator=g), "meta": [torch.randn(2, generator=g)]}
        target = {"kind": i % CLASSES, "value": torch.randn((), generator=g)}
        return {"inputs": inputs, "target": target, "name": f"sample {i}"}

    def count(self, batch: Any) -> int:
        return len(batch["name"])

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        h = self.backbone(torch.cat([inputs["x"], *inputs["meta"]], 1))
        return {"kind": self.head["kind"](h), "value": {"mean": self.head["value"](h)[:, 0]}}

    def outputs(self, batch: Any) -> Any:
        return self(batch["inputs"])

    def losses(self, outputs: Any, batch: Any) -> list[Tensor]:
        value = F.mse_loss(outputs["value"]["mean"], batch["target"]["value"])
        return [F.cross_entropy(outputs["kind"], batch["target"]["kind"]), value]

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        losses = torch.stack(self.losses(outputs, batch))
        return ((-self.scales).exp() * losses + self.scales).sum()

    def extras(self, stage: str, outputs: Any, batch: Any) -> None:
        losses = dict(zip(("kind", "value"), self.losses(outputs, batch), strict=True))
        options: dict[str, Any] = {"on_epoch": True, "batch_size": self.count(batch)}
        self.log_dict({f"{stage}/{name}": loss for name, loss in losses.items()}, **options)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"of": batch["name"], **self.outputs(batch)}


class Regression(Family):
    """Two outputs in a tuple, several losses, and a metric of their errors."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Softplus())
        self.head = nn.Linear(8, 2)
        self.error = torchmetrics.MeanSquaredError()

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        return torch.randn(6, generator=g), torch.randn((), generator=g)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.backbone(x)
        mean, scale = self.head(h * h).unbind(1)
        return mean, F.softplus(scale) + 0.1

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        (mean, scale), y = outputs, batch[1]
        likelihood = (((y - mean) / scale).square() / 2 + scale.log()).mean()
        return likelihood + F.l1_loss(mean, y) + F.huber_loss(mean, y)

    def extras(self, stage: str, outputs: Any, batch: Any) -> None:
        if stage != "train":
            self.error(outputs[0], batch[1])
            self.log(f"{stage}/error", self.error, batch_size=self.count(batch))


class Lists(Family):
    """Parameters in lists and dicts, some frozen, and a buffer that a forward reads."""

    def build(self) -> None:
        self.backbone = nn.Module()
        self.backbone.weights = nn.ParameterList([torch.randn(6, 6) / 2 for _ in range(3)])
        pairs = {"scale": torch.ones(6), "shift": torch.zeros(6)}
        self.affine = nn.ParameterDict(pairs)
        self.fixed = nn.ParameterList([nn.Parameter(torch.randn(6), requires_grad=False)])
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.full((6,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.backbone.weights:
            x = torch.tanh(x @ weight - self.mean + self.fixed[0])
        return self.head(x * self.affine["scale"] + self.affine["shift"])


class Reparametrised(Family):
    """Weight norm, and spectral norm, whose power iteration writes to buffers in the forward."""

    def build(self) -> None:
        self.backbone = weight_norm(nn.Linear(6, 8))
        self.second = spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.backbone(x)))))


class Frozen(Family):
    """A pretrained backbone that stays as it is, batch norm in evaluation mode included."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.backbone[1].running_mean.copy_(torch.linspace(-1, 1, 8))
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.backbone.eval()
        return self.head(self.backbone(x))


class Experts(Family):
    """Every sample goes to one of the experts: some shards use none of one, and one gets none."""

    def build(self) -> None:
        self.gate = nn.Linear(6, 3)
        self.backbone = nn.ModuleList([nn.Linear(6, 8) for _ in range(4)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(1).max(1)
        h = x.new_zeros(len(x), 8)
        for i, expert in enumerate(self.backbone):
            mine = (chosen == i).nonzero()[:, 0]
            if len(mine):
                weighted = expert(x[mine]) * share[mine, None]
                h = h.index_add(0, mine, weighted.to(h.dtype))  # autocast makes it smaller
        return self.head(torch.relu(h))


class Measured(Family):
    """Collections of metrics, wrapped metrics and metrics that keep all they have seen."""

    def build(self) -> None:
        self.backbone = nn.Linear(6, 8)
        self.head = nn.Linear(8, CLASSES)
        task: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
        metrics: dict[str, Any] = {
            "acc": torchmetrics.Accuracy(**task),
            "f1": torchmetrics.F1Score(**task, average="macro"),
            "auroc": torchmetrics.AUROC(**task),
        }
        self.val = torchmetrics.MetricCollection(metrics, prefix="val/")
        self.best = torchmetrics.MinMaxMetric(torchmetrics.Accuracy(**task))
        self.mean = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(x)))

    def extras(self, stage: str, outputs: Any, batch: Any) -> None:
        size = self.count(batch)
        if stage == "train":
            self.best.update(outputs, batch[1])
            self.mean(outputs.logsumexp(1))
            self.log("train/mean", self.mean, on_step=True, on_epoch=True, batch_size=size)
        elif stage == "val":
            self.val.update(outputs, batch[1])
            self.log_dict(self.val, batch_size=size)

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"train/{name}": value for name, value in self.best.compute().items()})
        self.best.reset()


class Variational(Family):
    """The noise of the latent variables comes with the sample."""

    def build(self) -> None:
        self.backbone = nn.Linear(6, 8)
        self.head = nn.Linear(4, 6)

    @staticmethod
    def sample(g: torch.Generator, i: int) -> Any:
        return torch.randn(6, generator=g), torch.randn(4, generator=g)

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, spread = self.backbone(x).chunk(2, 1)
        return {"x": self.head(mean + noise * spread.exp()), "mean": mean, "spread": spread}

    def outputs(self, batch: Any) -> Any:
        return self(*batch)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        mean, spread = outputs["mean"], outputs["spread"]
        divergence = (mean.square() + (2 * spread).exp() - 1 - 2 * spread).sum(1) / 2
        return F.mse_loss(outputs["x"], batch[0]) + 0.1 * divergence.mean()


class Contrastive(Family):
    """Every sample against all others of the batch: a loss for forward mode."""

    mode = "forward"

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(self.backbone(x)), dim=1)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        x, _ = batch
        other = self(x + 0.1 * x.flip(1))
        logits = outputs @ other.T / 0.5
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


class Adversarial(Family):
    """A generator, its critic and an optimizer for each, by hand; in forward mode."""

    mode = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))

    sample = Variational.sample

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.backbone(noise)
        return made, self.head(made), self.head(x)

    def outputs(self, batch: Any) -> Any:
        return self(*batch)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        _, fake, real = outputs
        return F.softplus(fake).mean() + F.softplus(-real).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        turns = zip(("critic", "generator"), (1, -1), self.optimizers(), strict=True)
        for name, sign, optimizer in turns:
            self.toggle_optimizer(optimizer)
            loss = sign * self.loss(self.outputs(batch), batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            size = self.count(batch)
            self.log(f"train/{name}", loss, on_step=True, on_epoch=True, batch_size=size)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(part.parameters(), self.lr) for part in (self.head, self.backbone)
        ]


FAMILIES: dict[str, type[Family]] = {
    family.__name__.lower(): family
    for family in (
        Perceptron,
        Convolutional,
        Recurrent,
        Language,
        Transformer,
        Autoencoder,
        Graph,
        MultiTask,
        Regression,
        Lists,
        Reparametrised,
        Frozen,
        Experts,
        Measured,
        Variational,
        Contrastive,
        Adversarial,
    )
}
