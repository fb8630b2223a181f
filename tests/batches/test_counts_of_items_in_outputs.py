"""What callbacks get as `outputs["num_items"]` is what one device's step has returned."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback
from oracle import Classifier, loader, trainer
from torch import Tensor
from torch.nn import functional as F

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda chosen: chosen.sum(),
    "float tensor of one element": lambda chosen: chosen.sum().float()[None],
    "int": lambda chosen: int(chosen.sum()),
    "float": lambda chosen: float(chosen.sum()),
    "none at all": lambda chosen: 0 * chosen.sum(),
    "not given": lambda chosen: None,
}


class Outputs(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["num_items"])


@pytest.mark.usefixtures("on", "one_thread")
@pytest.mark.parametrize("form", FORMS)
def test_it_has_the_form_in_which_the_step_returned_it(form: str) -> None:
    class Chosen(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses, chosen = (
                F.cross_entropy(self(batch[0]), batch[1], reduction="none"),
                batch[1] < 3,
            )
            return {"loss": losses.mean(), "num_items": FORMS[form](chosen)}

    one, several = Outputs(), Outputs()
    for devices, outputs in ((1, one), (3, several)):
        job = trainer(devices, "dp_custom", max_epochs=1, callbacks=[outputs])
        job.fit(Chosen(), loader(), loader())
    assert len(several.seen) == len(one.seen) == 3
    for actual, expected in zip(several.seen, one.seen, strict=True):
        assert type(actual) is type(expected)
        if isinstance(expected, Tensor):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert expected is None or float(actual) == float(expected)
