"""A plain PyTorch script, as written for nn.DataParallel. Only the import of it has changed:

-from torch.nn import DataParallel
+from lightning_dp import DataParallel

python examples/migrate.py --devices 2 --epochs 10
python examples/migrate.py --accelerator gpu --devices 4
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DataParallel


class Net(nn.Module):
    """Returns logits [N, 10]; with labels, the mean loss, as many models of that time do."""

    classes = 10

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
        self.head = nn.Linear(64, self.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits if labels is None else F.cross_entropy(logits, labels)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,440 training and 357 test images of digits."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    labels = torch.as_tensor(labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(model: nn.Module, data: TensorDataset, epochs: int, device: torch.device) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(data, batch_size=96, shuffle=True)
    model.train()
    for epoch in range(epochs):
        for images, labels in loader:
            loss = model(images.to(device), labels.to(device))
            loss = loss.mean()  # one loss per device
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1:3}   train/loss {loss.item():.4f}")


def test(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    correct = 0
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(data, batch_size=100):
            logits = model(images.to(device))
            correct += (logits.argmax(dim=1) == labels.to(device)).sum().item()
    return correct / len(data)


def write_old_checkpoint(path: Path) -> None:
    """What nn.DataParallel's `state_dict()` holds: every key begins with `module.`."""
    torch.save({f"module.{key}": value for key, value in Net().state_dict().items()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="A script for nn.DataParallel, on ours")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("logs/migrate"), help="of old and new")
    args = parser.parse_args()

    device, device_ids = devices_of(args.accelerator, args.devices)
    old, new = args.folder / "old.pt", args.folder / "new.pt"
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    write_old_checkpoint(old)
    train_data, test_data = load_data()

    model = DataParallel(Net().to(device), device_ids=device_ids, output_device=device_ids[0])
    model.load_state_dict(torch.load(old, map_location=device))
    print(f"{len(device_ids)} devices, {model.module.classes} classes")
    train(model, train_data, args.epochs, device)
    print(f"test/acc {test(model, test_data, device):.4f}")
    torch.save(model.state_dict(), new)

    # From here on it is not the old script: what has become of the `module.` keys.
    saved = torch.load(new, map_location="cpu")
    print(f"keys: old {next(iter(torch.load(old)))}, new {next(iter(saved))}")
    bare = Net()
    bare.load_state_dict(saved)
    print(
        f"test/acc {test(bare, test_data, torch.device('cpu')):.4f} of the bare module on the CPU"
    )


def devices_of(accelerator: str, count: int) -> tuple[torch.device, list[int] | list[str]]:
    """The first device, and what to pass as `device_ids`."""
    if accelerator == "cpu":
        return torch.device("cpu"), ["cpu"] * count
    return torch.device("cuda", 0), list(range(count))


if __name__ == "__main__":
    main()
