"""What processes tell each other arrives as it was sent, and costs few bytes the second time."""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle
import struct
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dp.parallel.processes.codec import Encoded, Room, decode, encode


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Told:
    name: str
    value: Any
    more: Any = None


class Kind(enum.IntEnum):
    A = 1
    B = 2


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
)


def received(value: Any) -> Any:
    """The value as another process gets it."""
    encoded = encode(value)
    return decode(encoded.skeleton, written(encoded, 7), 7)


def written(encoded: Encoded, start: int) -> Room:
    room = Room(start + encoded.length + 1)
    encoded.write(room, start)
    return room


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the bit, with their types."""
    if isinstance(a, Tensor):
        alike = type(b) is Tensor and (a.dtype, a.shape) == (b.dtype, b.shape)
        own = a.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return alike and own.tolist() == b.reshape(-1).view(torch.uint8).tolist()
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    return bool(a == b)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    own = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        own = bytes(byte & 1 for byte in own)
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor = torch.frombuffer(bytearray(own), dtype=dtype).view(shape)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


CONSTANTS = st.one_of(st.none(), st.text(max_size=4), st.sampled_from([*Kind, torch.float16, Told]))
LEAVES = st.one_of(
    *(st.floats(), st.integers(), st.booleans(), st.complex_numbers(), st.binary(max_size=40)),
    *(CONSTANTS, tensors(), st.text(min_size=129, max_size=140)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Told, st.text(max_size=3), inner, inner),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_every_tree_arrives_as_it_was(tree: Any) -> None:
    assert same(tree, received(tree))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 2)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    tensor = torch.ones(shape).to(dtype)
    assert same(tensor, received(tensor))
    assert encode(tensor).length == size + 8 * len(shape)


def test_tensors_that_lie_in_memory_in_another_way() -> None:
    base = torch.arange(24.0).view(4, 6)
    strange = [base.t(), base[::2, 1::2], base[1].expand(3, 6), torch.randn(2, 3, 4, 4)]
    strange[3] = strange[3].to(memory_format=torch.channels_last)
    strange.append(base[:1, :4][:, ::4])  # one element, of any stride
    strange.append(torch.tensor([1 + 2j, -1j]).conj())
    strange.append(torch.tensor([1 + 2j, -1j]).conj().imag)  # has the negative bit
    for tensor in strange:
        assert torch.equal(received(tensor), tensor)


def test_graphs_stay_behind() -> None:
    leaf = nn.Parameter(torch.ones(2))
    got = received({"leaf": leaf, "inner": leaf * 2})
    assert not got["leaf"].requires_grad and not got["inner"].requires_grad
    assert type(got["leaf"]) is Tensor
    assert got["inner"].tolist() == [2.0, 2.0] and leaf.requires_grad


def test_what_arrives_is_independent() -> None:
    shared = torch.zeros(2)
    encoded = encode([shared, shared])
    room = written(encoded, 0)
    first, second = decode(encoded.skeleton, room, 0)
    first += 1
    room.tensor.zero_()
    assert first.tolist() == [1.0, 1.0] and second.tolist() == shared.tolist() == [0.0, 0.0]
    second.resize_(100)  # it owns its memory


def test_other_tensors_are_pickled_as_their_classes_say() -> None:
    sparse = torch.eye(3).to_sparse().requires_grad_()
    assert torch.equal(received(sparse).to_dense(), torch.eye(3))
    meta = received(torch.empty(2, 3, device="meta"))
    assert meta.device.type == "meta" and meta.shape == (2, 3)


def test_arrays_and_objects() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6.0).reshape(2, 3)
    got = received({"array": array, "scalar": numpy.float64(1.5), "error": ValueError("no", 3)})
    assert (got["array"] == array).all() and type(got["scalar"]) is numpy.float64
    assert repr(got["error"]) == repr(ValueError("no", 3))
    assert encode(array).skeleton == encode(array + 1).skeleton


def test_a_list_in_itself_and_two_names_of_one_object() -> None:
    own: list[Any] = [1.0]
    own.append(own)
    got = received(own)
    assert got[1] is got
    first, second = received([["x"]] * 2)
    assert first is second


def test_lone_surrogates_and_long_texts() -> None:
    text = "\ud800" * 200
    assert received([text, "x" * 1000]) == [text, "x" * 1000]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(), min_size=5, max_size=5), st.integers(-(2**63), 2**63 - 1), tensors())
def test_numbers_and_tensors_leave_the_skeleton_as_it_is(
    floats: list[float], integer: int, tensor: Tensor
) -> None:
    """Only what a step says by its structure stands in a skeleton."""
    told = Told("loss", {"a": floats, "n": integer, "yes": True}, tensor)
    other = Told("loss", {"a": [0.0] * 5, "n": 0, "yes": False}, torch.ones_like(tensor))
    bigger = Told(
        "loss", other.value, torch.ones([*(n + 1 for n in tensor.shape)]).to(tensor.dtype)
    )
    skeletons = {encode(value).skeleton for value in (told, other, bigger)}
    assert len(skeletons) == 1


def test_five_numbers_are_some_forty_bytes() -> None:
    encoded = encode((1.0, 2, 0.5, True, 3.0))
    assert encoded.length == 33


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        encode([1, lambda: 0])
    local = namedtuple("local", "a")
    with pytest.raises(pickle.PicklingError):
        encode(local(1))


def test_inference_mode_and_another_default_device() -> None:
    with torch.inference_mode():
        encoded = encode(torch.ones(2))
        room = written(encoded, 0)
    encode(torch.zeros(2)).write(room, 0)
    assert decode(encoded.skeleton, room, 0).tolist() == [0.0, 0.0]
    with torch.device("meta"):
        got = received([OrderedDict(a=torch.ones(2, device="cpu"))])[0]["a"]
    assert got.device.type == "cpu" and got.tolist() == [1.0, 1.0]
