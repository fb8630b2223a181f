"""Attributes that are others for a while come back as they were, whatever happens."""

import pytest
from torch import nn

from lightning_dp.parallel.contexts import replaced


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("own", [{}, {"forward": len}])
def test_what_was_there_is_put_back(error: type[BaseException] | None, own: dict) -> None:
    layer = nn.Linear(2, 2)
    vars(layer).update(own)
    before = dict(vars(layer))
    try:
        with replaced(layer, forward=max, extra=1):
            with replaced(layer, forward=min):
                del vars(layer)["forward"]  # as code inside may do
            assert layer.forward is max and layer.extra == 1
            if error is not None:
                raise error
    except BaseException as raised:
        assert type(raised) is error
    assert vars(layer) == before
