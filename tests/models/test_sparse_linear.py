"""Linear models on sparse samples, and standardized ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mlbench_core.models.pytorch.linear_models import (
    LinearRegression,
    LogisticRegression,
    Standardization,
)
from tests.helpers.ranks import run_ranks

SAMPLES = torch.tensor([[0.0, 1.5, 0.0, -2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 1.0]])


def to_csr(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says once that CSR is in beta
        return x.to_sparse_csr()


@pytest.mark.parametrize("make", [LogisticRegression, LinearRegression])
@pytest.mark.parametrize("convert", [Tensor.to_sparse, to_csr])
def test_sparse_samples_give_the_outputs_and_dense_gradients_of_dense_ones(make, convert) -> None:
    model = make(4)
    gradients = []
    for x in (SAMPLES, convert(SAMPLES)):
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        gradients.append(
            (output.detach(), model.linear.weight.grad.clone(), model.linear.bias.grad.clone())
        )
    for dense, sparse in zip(*gradients, strict=True):
        assert sparse.layout == torch.strided
        torch.testing.assert_close(sparse, dense)


def test_entries_given_twice_add_up_and_need_no_order() -> None:
    x = torch.sparse_coo_tensor(
        [[1, 0, 1], [2, 0, 2]], [1.0, 4.0, 2.0], (2, 3), check_invariants=True
    )
    model = LinearRegression(3)
    torch.testing.assert_close(model(x), model(x.to_dense()))


def test_sparse_samples_of_another_width_or_layout_are_named() -> None:
    model = LogisticRegression(5)
    with pytest.raises(ValueError, match=r"must have shape \(batch, 5\), not \(3, 4\)"):
        model(SAMPLES.to_sparse())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        by_column = SAMPLES.to_sparse_csc()
    with pytest.raises(ValueError, match="sparse_csc"):
        LogisticRegression(4)(by_column)


def test_logits_are_those_of_the_probabilities() -> None:
    model = LogisticRegression(4)
    on_logits = LogisticRegression(4, logits=True)
    on_logits.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.sigmoid(on_logits(SAMPLES)), model(SAMPLES))


def standardize(rank: int, world_size: int, samples: Tensor) -> dict[str, Tensor]:
    part = samples[rank::world_size]
    scaling = Standardization.of([(part[:3], None), (part[3:], None)])
    return {**scaling.state_dict(), "parameters": torch.tensor(len(list(scaling.parameters())))}


def test_standardization_is_that_of_the_whole_training_set_on_every_worker() -> None:
    generator = torch.Generator().manual_seed(5)
    samples = 1e4 + torch.randn(11, 3, generator=generator, dtype=torch.float64) * torch.tensor(
        [1.0, 50.0, 0.0]
    )
    samples[:, 2] = 0.1  # whose mean over 11 samples is not 0.1 to the last bit
    expected = samples.numpy().copy()
    for result in (standardize(0, 1, samples), *run_ranks(2, standardize, samples)):
        np.testing.assert_allclose(result["mean"], expected.mean(0), rtol=1e-6)
        np.testing.assert_allclose(1 / result["scale"][:2], expected.std(0)[:2], rtol=1e-6)
        assert result["scale"][2] == 0
        assert result["parameters"] == 0
    with pytest.raises(ValueError, match="at least one batch, not none"):
        Standardization.of([])
    with pytest.raises(ValueError, match=r"samples must be dense, not torch.sparse"):
        nn.Sequential(Standardization(torch.zeros(4), torch.ones(4)), LogisticRegression(4))(
            SAMPLES.to_sparse()
        )
    with pytest.raises(ValueError, match="at least 0"):
        Standardization(torch.zeros(2), torch.tensor([1.0, -1.0]))
