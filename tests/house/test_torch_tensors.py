"""Each private name of torch in `torch_private.tensors` does what is said of it there."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.parallel.torch_private import tensors as private


def test_version_counts_writes_in_place() -> None:
    x = torch.zeros(2)
    before = private.version(x)
    x.add_(1)
    assert private.version(x) == before + 1
    x.data.add_(1)
    assert private.version(x) == before + 1, "through .data no write is seen"
    x[:1].add_(1)
    assert private.version(x) == before + 2, "a view counts with its base"


def test_version_of_an_inference_tensor_raises() -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
    with pytest.raises(RuntimeError, match="version"):
        private.version(x)


def test_foreach_add() -> None:
    targets, terms = [torch.ones(2), torch.zeros(1)], [torch.ones(2), torch.full((1,), 3.0)]
    memory = [t.data_ptr() for t in targets]
    private.add_to_each(targets, terms)
    assert [t.tolist() for t in targets] == [[2, 2], [3]]
    assert [t.data_ptr() for t in targets] == memory


def test_foreach_copy() -> None:
    targets, sources = [torch.ones(2), torch.zeros(1)], [torch.zeros(2), torch.full((1,), 3.0)]
    memory = [t.data_ptr() for t in targets]
    private.copy_to_each(targets, sources)
    assert [t.tolist() for t in targets] == [[0, 0], [3]]
    assert [t.data_ptr() for t in targets] == memory


def test_foreach_norm() -> None:
    norms = private.norm_of_each([torch.tensor([3.0, 4.0]), torch.full((2, 2), -1.0)])
    assert [norm.tolist() for norm in norms] == [5.0, 2.0]


def test_flatten_dense_tensors() -> None:
    flat = private.flattened([torch.tensor([[1.0, 2.0]]), torch.tensor(3.0), torch.empty(0)])
    assert flat.tolist() == [1, 2, 3]
    column = torch.arange(4.0).view(2, 2).t()
    assert private.flattened([column, torch.ones(1)]).tolist() == [0, 2, 1, 3, 1]
