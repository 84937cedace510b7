"""Getting batches ready."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import pytest
import torch

from mlbench_core.controlflow.pytorch.batches import (
    convert_dtype,
    iterate_dataloader,
    maybe_range,
    prepare_batch,
)

DTYPES = [
    ("fp16", torch.float16),
    ("bf16", torch.bfloat16),
    ("fp32", torch.float32),
    ("fp64", torch.float64),
]


def test_maybe_range_counts_to_a_maximum_or_for_ever() -> None:
    assert list(maybe_range(4)) == [0, 1, 2, 3]
    assert list(maybe_range(0)) == []
    assert list(islice(maybe_range(None), 1000, 1002)) == [1000, 1001]
    with pytest.raises(ValueError, match="-2"):
        maybe_range(-2)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_convert_dtype_of_tensors_and_modules(name, dtype) -> None:
    assert convert_dtype(name, torch.tensor([1, 2])).dtype == dtype
    module = torch.nn.Linear(2, 2)
    assert convert_dtype(name, module) is module
    assert module.weight.dtype == dtype


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fp16', 'bf16', 'fp32', 'fp64', not 'int8'"):
        convert_dtype("int8", torch.zeros(1))
    with pytest.raises(ValueError, match="'fp23'"):
        prepare_batch(torch.zeros(1, dtype=torch.long), torch.zeros(1), "fp23")
    with pytest.raises(NotImplementedError, match="'int8'"):  # what version 3.0 raised
        convert_dtype("int8", torch.zeros(1))


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_token_ids_stay_integers(name, dtype) -> None:
    tokens = torch.tensor([[2**24 + 1, 3]])  # as a float32 it would be another token
    batches = list(iterate_dataloader([(tokens, tokens)], name))
    assert batches[0][0].dtype == batches[0][1].dtype == torch.int64
    assert torch.equal(batches[0][0], tokens)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_floats_are_converted_and_targets_on_request(name, dtype) -> None:
    data, labels = torch.zeros(2, 3, dtype=torch.float32), torch.tensor([0, 1])
    prepared, target = prepare_batch(data, labels, name)
    assert (prepared.dtype, target.dtype) == (dtype, torch.int64)
    _, target = prepare_batch(data, labels, name, transform_target_dtype=True)
    assert target.dtype == dtype
    ((_, target),) = iterate_dataloader([(data, labels)], name, transform_target_type=True)
    assert target.dtype == dtype
    data, _ = prepare_batch(data, labels, None)
    assert data.dtype == torch.float32


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_integer_images_become_numbers_that_a_model_takes(name, dtype) -> None:
    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32):
        images, labels = (
            torch.tensor([[0, 100], [7, 1]], dtype=kind),
            torch.tensor([0, 1], dtype=kind),
        )
        ((data, target),) = iterate_dataloader([(images, labels)], name)
        assert data.dtype == dtype
        assert data.tolist() == images.tolist()
        assert target.dtype == kind
    (data, _) = prepare_batch(torch.zeros(2, dtype=torch.uint8), None, None)
    assert data.dtype == torch.uint8


def test_integers_inside_a_nested_batch_and_booleans_stay() -> None:
    lengths, mask = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True, False])
    (data, _) = prepare_batch({"image": torch.zeros(1), "lengths": lengths}, None, "fp64")
    assert data["image"].dtype == torch.float64
    assert data["lengths"] is lengths
    assert prepare_batch(mask, None, "fp64")[0] is mask


class Source(NamedTuple):
    tokens: torch.Tensor
    lengths: torch.Tensor


def test_nested_batches() -> None:
    source = Source(torch.zeros(2, dtype=torch.float64), torch.tensor([1, 2]))
    (data, target) = prepare_batch(
        [source, {"mask": torch.ones(2, dtype=torch.float64)}], ["text"], "fp32"
    )
    assert isinstance(data[0], Source)
    assert data[0].tokens.dtype == data[1]["mask"].dtype == torch.float32
    assert data[0].lengths.dtype == torch.int64
    assert target == ["text"]


def test_no_batch_is_drawn_beyond_the_maximum() -> None:
    drawn = []

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(10):
            drawn.append(number)
            yield torch.tensor([float(number)]), torch.tensor([number])

    batches = list(iterate_dataloader(loader(), "fp32", max_batch_per_epoch=3))
    assert [target.item() for _, target in batches] == [0, 1, 2] == drawn
    assert len(list(iterate_dataloader(loader(), "fp32"))) == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to put batches on")
def test_batches_go_to_the_gpu() -> None:
    data, target = prepare_batch(torch.zeros(2), [torch.zeros(1)], "fp16", use_cuda=True)
    assert data.is_cuda and target[0].is_cuda
