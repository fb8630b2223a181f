"""A module's own `log`, in several processes: it is called as on one device."""

from typing import Any

import pytest
from cases import Case, assert_as_on_one_device
from oracle import ByHand, Classifier


class Prefixed(Classifier):
    """Takes any options."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(f"own/{name}", value, *args, **kwargs)


class Strict(Classifier):
    """Takes options of its own alone, by position too."""

    def log(
        self,
        name: str,
        value: Any,
        scale: float = 1.0,
        on_step: bool = False,
        on_epoch: bool = True,
    ) -> None:  # type: ignore[override]  # as users do
        super().log(name, value, on_step=on_step, on_epoch=on_epoch, reduce_fx="sum")
        super().log(f"{name}/{scale}", value * scale, on_step=on_step, on_epoch=on_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, 3.0, True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", self.loss(batch), 2.0)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch), 2.0)


class StrictByHand(ByHand, Strict):
    """The same with manual optimisation."""


MODES: list[dict[str, Any]] = [{}, {"mode": "forward"}]


@pytest.mark.slow
def test_it_is_called_as_on_one_device() -> None:
    makes = [Prefixed, Strict, StrictByHand]
    assert_as_on_one_device([Case(make, mode) for make in makes for mode in MODES])
