"""Orthonormal bases of awkward matrices, and packing."""

from __future__ import annotations

import pytest
import torch

from mlbench_core.aggregation.pytorch.compression.compressed import orthonormal_rows
from mlbench_core.aggregation.pytorch.compression.tensors import (
    orthogonalize,
    pack_tensors,
    unpack_tensors,
)


def _random(
    rows: int, columns: int, rank: int | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    if rank is None:
        return torch.randn(rows, columns, generator=generator, dtype=dtype)
    left = torch.randn(rows, rank, generator=generator, dtype=dtype)
    return left @ torch.randn(rank, columns, generator=generator, dtype=dtype)


MATRICES = {
    "random": _random(60, 4),
    "rank 1 of 4": _random(60, 4, rank=1),
    "rank 2 of 6, tiny": _random(40, 6, rank=2) * 1e-12,
    "huge": _random(40, 3) * 1e18,
    "zero": torch.zeros(7, 3),
    "zero column in the middle": torch.tensor([[1.0, 0, 1], [1, 0, 2], [1, 0, 3], [1, 0, 5]]),
    "equal columns": torch.ones(5, 5),
    "nearly equal columns": torch.ones(50, 3) + 1e-6 * _random(50, 3),
    "square": _random(5, 5),
    "float64": _random(30, 4, rank=2, dtype=torch.float64),
    "one row": torch.tensor([[2.0]]),
    "zero columns, square": torch.tensor([[0.0, 0, 3], [0, 0, 4], [0, 0, 0]]),
    "no rows": torch.zeros(0, 0),
}


@pytest.mark.parametrize("name", MATRICES)
def test_columns_become_orthonormal_and_span_the_matrix(name: str) -> None:
    matrix = MATRICES[name]
    tolerance = 100 * torch.finfo(matrix.dtype).eps
    basis = matrix.clone()
    assert orthogonalize(basis) is None
    gram = basis.T @ basis
    assert torch.allclose(
        gram, torch.eye(matrix.shape[1], dtype=matrix.dtype), atol=tolerance, rtol=0
    )
    error = (basis @ (basis.T @ matrix) - matrix).norm()
    assert error <= 10 * tolerance * matrix.norm()


def test_columns_are_those_of_qr_on_a_well_conditioned_matrix() -> None:
    matrix = _random(50, 5, dtype=torch.float64)
    basis = matrix.clone()
    orthogonalize(basis)
    q, r = torch.linalg.qr(matrix)
    assert torch.allclose(basis, q * r.diagonal().sign(), atol=1e-13)


def test_columns_beyond_the_rows_become_zero() -> None:
    basis = _random(3, 5)
    orthogonalize(basis)
    assert torch.allclose(basis[:, :3].T @ basis[:, :3], torch.eye(3), atol=1e-5)
    assert not basis[:, 3:].any()


def test_equal_input_gives_equal_output_and_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    first, second = torch.zeros(6, 2), torch.zeros(6, 2)
    orthogonalize(first)
    orthogonalize(second)
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("eps", [1e-3, torch.FloatTensor([1e-3])])
def test_columns_up_to_eps_count_as_zero(eps: float | torch.Tensor) -> None:
    matrix = torch.tensor([[0.0], [0.0], [1e-4]])
    kept = matrix.clone()
    orthogonalize(matrix, eps)
    assert matrix.flatten().tolist() == [1.0, 0.0, 0.0]
    orthogonalize(kept)
    assert kept.flatten().tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_half_precision_views_and_parameters_in_place() -> None:
    half = _random(20, 3).half()
    orthogonalize(half)
    assert torch.allclose(half.float().T @ half.float(), torch.eye(3), atol=5e-3)
    storage = torch.zeros(2, 30)
    storage[0] = _random(10, 3).flatten()
    orthogonalize(storage[0].view(10, 3))
    view = storage[0].view(10, 3)
    assert torch.allclose(view.T @ view, torch.eye(3), atol=1e-5)
    assert not storage[1].any()
    weight = torch.nn.Parameter(_random(6, 2))
    orthogonalize(weight)
    assert weight.grad_fn is None


def test_overflow_is_not_hidden() -> None:
    matrix = torch.tensor([[float("nan"), 1.0], [1.0, 2.0]])
    orthogonalize(matrix)
    assert matrix.isnan().any()


def test_orthogonalize_refuses_what_is_no_matrix() -> None:
    with pytest.raises(TypeError, match="int64"):
        orthogonalize(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        orthogonalize(torch.ones(3))
    with pytest.raises(ValueError, match="eps must be at least 0, not -1"):
        orthogonalize(torch.ones(2, 2), -1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "kind", ["random", "equal", "nearly equal", "zero first", "zero last", "tiny", "huge"]
)
def test_rows_become_orthonormal(kind: str, count: int, dtype: torch.dtype) -> None:
    precision = torch.finfo(dtype).eps
    for seed in range(20):
        for length in (6, 7, 300):
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randn(count, length, generator=generator, dtype=dtype)
            if kind in ("equal", "nearly equal"):
                rows = rows[:1] + (kind == "nearly equal") * 10 * precision * rows
                rows = rows.expand(count, length).clone()
            scales = {"tiny": 1e-30, "huge": 1e30}
            rows *= scales.get(kind, 1)
            zero = {"zero first": 0, "zero last": -1}.get(kind)
            if zero is not None:
                rows[zero] = 0
            given = rows.clone()
            basis = orthonormal_rows(rows)
            assert torch.equal(rows, given)
            products = basis @ basis.T
            is_there = products.diagonal() > 0.5
            expected = torch.diag(is_there.to(dtype))
            torch.testing.assert_close(products, expected, rtol=0, atol=40 * precision)
            assert not is_there[zero] if zero is not None else is_there[0]
            scaled = rows / rows.abs().amax(1, keepdim=True).clamp_min(1e-38)
            torch.testing.assert_close(
                scaled @ basis.T @ basis, scaled, rtol=0, atol=100 * precision
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_have_the_span_that_qr_finds(dtype: torch.dtype) -> None:
    rows = _random(5, 40, dtype=dtype)
    rows[3] = rows[0] - 2 * rows[1]  # depends on the others, to rounding
    basis, independent = orthonormal_rows(rows), [0, 1, 2, 4]
    q = torch.linalg.qr(rows[independent].T.double()).Q.T.to(dtype)
    tolerance = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        basis[independent[:3]].T @ basis[:3], q[:3].T @ q[:3], rtol=0, atol=tolerance
    )
    torch.testing.assert_close(q @ basis.T @ basis, q, rtol=0, atol=tolerance)
    torch.testing.assert_close(basis @ basis.T, torch.eye(5, dtype=dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_packing_and_unpacking_gives_back_the_tensors(dtype: torch.dtype) -> None:
    images = (
        torch.arange(2 * 3 * 4 * 4)
        .reshape(2, 3, 4, 4)
        .to(dtype)
        .to(memory_format=torch.channels_last)
    )
    tensors = [
        torch.arange(6).reshape(2, 3).to(dtype),
        torch.tensor(7).to(dtype),
        images,
        torch.arange(8).to(dtype).reshape(2, 4).T,
        torch.zeros(0, 3, dtype=dtype),
    ]
    vec, indices, sizes = pack_tensors(tensors)
    assert vec.dtype == dtype
    assert indices == [0, 6, 7, 103, 111, 111]
    assert sizes == [tensor.size() for tensor in tensors]
    parts = unpack_tensors(vec, indices, sizes)
    assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors, strict=True))
    parts[1].fill_(9)
    assert vec[6] == 9
    assert tensors[1] == 7


def test_packing_detaches_and_takes_an_empty_list() -> None:
    vec, _, _ = pack_tensors([torch.nn.Parameter(torch.ones(2))])
    assert not vec.requires_grad
    vec, indices, sizes = pack_tensors([])
    assert (vec.numel(), indices, sizes) == (0, [0], [])
    assert unpack_tensors(vec, indices, sizes) == []


def test_packing_refuses_what_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"one dtype, not .*torch.float32.*torch.float64"):
        pack_tensors([torch.ones(1), torch.ones(1).double()])
    with pytest.raises(ValueError, match=r"cpu.*meta"):
        pack_tensors([torch.ones(1), torch.ones(1, device="meta")])
    with pytest.raises(ValueError, match=r"one number more than sizes, .*, not 2 for 2 sizes"):
        unpack_tensors(torch.ones(2), [0, 2], [torch.Size([1])] * 2)
    with pytest.raises(ValueError, match="at least 3 elements"):
        unpack_tensors(torch.ones(2), [0, 3], [torch.Size([3])])
