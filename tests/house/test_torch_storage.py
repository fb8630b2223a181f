"""Private names of torch, of memory: each does what we take it for."""

from __future__ import annotations

import sys

import pytest
import torch
from oracle import devices_of

from lightning_dp.parallel.torch_private import is_alone_in_memory, uses, uses_of_memory

pytestmark = pytest.mark.usefixtures("on")


def test_storage_Use_Count_of_a_cdata_tells_of_views() -> None:
    tensor = torch.ones(4, device=devices_of(1)[0])
    assert is_alone_in_memory(tensor)
    view = tensor.view(2, 2)
    assert not is_alone_in_memory(tensor)
    assert not is_alone_in_memory(view)
    del view
    assert is_alone_in_memory(tensor)


def test_storage_Use_Count_of_a_cdata_counts_tensors_and_one_object_of_python() -> None:
    tensor = torch.ones(4, device=devices_of(1)[0])
    memory = tensor.untyped_storage()
    assert uses_of_memory(memory) == 2
    views = [tensor.data, tensor.detach(), tensor[1:]]
    assert uses_of_memory(memory) == 2 + len(views)


def test_use_count_tells_of_what_holds_a_tensor_in_cpp_and_with_it_its_python_object() -> None:
    held = [torch.nn.Parameter(torch.ones(2, device=devices_of(1)[0]))]

    def counts() -> tuple[int, int]:
        (count,) = map(sys.getrefcount, held)
        return uses(held[0]), count

    alone = counts()
    graph = (held[0] * held[0]).sum()  # saved twice
    (of_cpp, of_python), before = counts(), alone
    assert of_cpp > before[0] == 1
    assert of_python == before[1] + 1
    del graph
    assert counts() == alone
    another = held[0]
    assert counts() == (1, alone[1] + 1) and another is held[0]


def test_a_gradient_may_be_a_view_that_a_backward_still_reads() -> None:
    """Autograd gives a parameter what it gets; here others get the same memory."""
    device = devices_of(1)[0]
    x = torch.ones(3, requires_grad=True, device=device)
    shared = torch.nn.Parameter(torch.ones(3, 1, device=device))
    own = torch.nn.Parameter(torch.ones(3, device=device))
    seen = []
    for parameter in (shared, own):
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append(is_alone_in_memory(p.grad))
        )
    (x * 2 + shared.view(3)).sin().sum().backward()
    (x * own).sin().sum().backward()
    assert seen == [False, True]
