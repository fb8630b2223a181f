"""What callbacks get as `outputs["num_items"]` is what one device's step has returned."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback
from oracle import Classifier, loader, trainer
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import DataParallelStrategy

pytestmark = pytest.mark.usefixtures("on", "one_thread")

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda chosen: chosen.sum(),
    "float tensor of one element": lambda chosen: chosen.sum().float()[None],
    "int": lambda chosen: int(chosen.sum()),
    "float": lambda chosen: float(chosen.sum()),
    "none at all": lambda chosen: 0 * chosen.sum(),
    "not told": lambda chosen: None,
}


class Outputs(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["num_items"])


def counts_on(devices: int, form: str, **options: Any) -> list[Any]:
    class Chosen(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            losses, chosen = F.cross_entropy(self(x), y, reduction="none"), y < 3
            return {"loss": losses.mean(), "num_items": FORMS[form](chosen)}

    outputs = Outputs()
    options = {"strategy": DataParallelStrategy(**options), "callbacks": [outputs]}
    trainer(devices, max_epochs=1, **options).fit(Chosen(), loader(), loader())
    return outputs.seen


@pytest.mark.parametrize("executor", ["threads", "inorder"])
@pytest.mark.parametrize("form", FORMS)
def test_it_has_the_form_in_which_the_step_told_it(form: str, executor: str) -> None:
    expected, actual = counts_on(1, form), counts_on(3, form, executor=executor)
    assert len(actual) == len(expected) == 3
    for own, one in zip(actual, expected, strict=True):
        assert type(own) is type(one)
        if isinstance(one, Tensor):
            assert (own.dtype, own.shape) == (one.dtype, one.shape)
        assert (own if own is None else float(own)) == (one if one is None else float(one))
