"""The state of modules after a step that ended half-way: the next one begins with the root's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dp.parallel.replicate import Replicas
from lightning_dp.parallel.scatter import Shards
from lightning_dp.state import ModuleState
from lightning_dp.state.containers import Merge

CPU = torch.device("cpu")


class Listing(nn.Module):
    """Two containers, and a module that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.outputs: list[torch.Tensor] = []
        self.seen: dict[str, int] = {"steps": 0}


@pytest.fixture
def step() -> Iterator[tuple[Listing, Replicas, ModuleState, Shards]]:
    """A module, its replicas, their state, and a batch."""
    module = Listing()
    replicas = Replicas(module, [CPU] * 3)
    yield module, replicas, ModuleState(CPU), Shards((2, 1, 1), [torch.ones(2, 3)] * 3)


def append(replicas: Replicas) -> None:
    for module in replicas.modules:
        module.outputs.append(torch.ones(()))


def contents(replicas: Replicas) -> list[Any]:
    return [(list(module.outputs), dict(module.seen)) for module in replicas.modules]


@pytest.mark.parametrize("where", ["in the step", "while it is settled"])
@pytest.mark.parametrize("undone", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
def test_replicas_begin_with_the_roots_items_after_a_step_that_failed(
    step: Any, where: str, undone: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, replicas, state, shards = step
    for _ in range(steps):  # after which it is known that they change
        replicas.refresh()
        state.begin(replicas, shards.active)
        append(replicas)
        state.settle(state.changes(shards.active), replicas, shards)
        module.outputs.clear()
    replicas.refresh()
    state.begin(replicas, shards.active)
    append(replicas)
    if where == "while it is settled":

        def fail(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(Merge, "into", fail)
            state.settle(state.changes(shards.active), replicas, shards)
    if undone:
        state.undo()
    replicas.refresh()
    state.begin(replicas, shards.active)
    assert contents(replicas) == [contents(replicas)[0]] * 3
    assert len(module.outputs) == (0 if undone else 1)
    assert len({id(other.outputs) for other in replicas.modules}) == 3


def test_what_a_hook_binds_where_one_replica_works_is_not_the_next_steps(step: Any) -> None:
    module, replicas, state, shards = step
    alone = Shards((1, 0, 0), [torch.ones(1, 3), None, None])
    for number in range(3):
        module.rate = torch.full((1,), float(number))  # as a hook between steps
        replicas.refresh(alone.active)
        state.begin(replicas, alone.active)
        assert not any(state.changes(alone.active))
    module.rate = torch.zeros(1)
    replicas.refresh()
    state.begin(replicas, shards.active)
    module.rate = torch.ones(1)
    (_, name, differs), *others = state.changes(shards.active).rebound
    assert name == "rate" and differs and not others


class Bare(nn.Module):
    """No containers and no tensors, which replicas would have of their own."""

    factor = 1.0


def test_what_a_hook_binds_is_not_the_steps_where_replicas_have_nothing_of_their_own() -> None:
    module = Bare()
    replicas, state, active = Replicas(module, [CPU] * 3), ModuleState(CPU), (0, 1, 2)
    for factor in (2.0, 3.0):
        module.factor = factor
        replicas.refresh()
        state.begin(replicas, active)
    module.other = 1.0
    assert [name for _, name, _ in state.changes(active).rebound] == ["other"]
    state.undo()
    assert vars(module)["factor"] == 3.0 and "other" not in vars(module)


def test_a_rename_that_keeps_number_and_values_of_attributes_is_seen(step: Any) -> None:
    module, replicas, state, shards = step
    module.last = value = torch.zeros(1)
    replicas.refresh()
    state.begin(replicas, shards.active)
    del module.last
    module.latest = value
    assert [name for _, name, _ in state.changes(shards.active).rebound] == ["latest"]


def test_an_item_that_goes_from_one_list_to_the_next_is_seen(step: Any) -> None:
    module, replicas, state, shards = step
    item = torch.ones(())
    module.first, module.second = [item], []
    replicas.refresh()
    state.begin(replicas, shards.active)
    for other in replicas.modules:
        other.second.append(other.first.pop())
    changed = state.changes(shards.active).containers
    assert [container.place[1] for container in changed] == ["first", "second"]
