"""Penalties and smoothed labels against independent computations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlbench_core.evaluation.pytorch.criterion import (
    BCELossRegularized,
    LabelSmoothing,
    MSELossRegularized,
)


@pytest.fixture
def model() -> nn.Module:
    """A model whose weights have an l1 norm of 10 and a squared l2 norm of 30."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
        model.bias.copy_(torch.tensor([-4.0]))
    return model


CASES = [(BCELossRegularized, F.binary_cross_entropy), (MSELossRegularized, F.mse_loss)]


@pytest.mark.parametrize(("loss_class", "plain"), CASES)
@pytest.mark.parametrize(
    ("l1", "l2", "penalty"), [(0.0, 0.0, 0.0), (0.5, 0.0, 5.0), (0.0, 0.2, 3.0), (0.5, 0.2, 8.0)]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_penalty_is_over_all_parameters(
    loss_class, plain, l1, l2, penalty, reduction, model
) -> None:
    output, target = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0.0, 1.0, 1.0])
    loss = loss_class(l1=l1, l2=l2, model=model, reduction=reduction)
    torch.testing.assert_close(
        loss(output, target), plain(output, target, reduction=reduction) + penalty
    )


@pytest.mark.parametrize(("loss_class", "plain"), CASES)
def test_the_penalty_has_a_gradient(loss_class, plain, model) -> None:
    loss = loss_class(l1=0.5, l2=0.1, model=model)
    loss(torch.tensor([0.5]), torch.tensor([0.5])).backward()
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, -0.7, 0.8]]))
    torch.testing.assert_close(model.bias.grad, torch.tensor([-0.9]))


@pytest.mark.parametrize(("loss_class", "plain"), CASES)
def test_without_a_penalty_no_model_is_needed(loss_class, plain) -> None:
    output, target = torch.tensor([0.2, 0.7]), torch.tensor([0.0, 1.0])
    torch.testing.assert_close(loss_class()(output, target), plain(output, target))


@pytest.mark.parametrize(("loss_class", "plain"), CASES)
def test_a_penalty_without_a_model_or_below_zero_is_refused(loss_class, plain, model) -> None:
    with pytest.raises(ValueError, match="pass model="):
        loss_class(l2=0.1)
    with pytest.raises(ValueError, match="l1 must be at least 0, not -1"):
        loss_class(l1=-1.0, model=model)


@pytest.mark.parametrize(("loss_class", "plain"), CASES)
def test_the_model_is_no_part_of_the_loss(loss_class, plain, model) -> None:
    loss = loss_class(l2=0.1, model=model)
    assert list(loss.parameters()) == []
    assert loss.state_dict() == {}


@pytest.mark.parametrize(("loss_class", "plain"), CASES)
def test_the_penalty_can_be_read_and_changed_at_the_loss(loss_class, plain, model) -> None:
    output, target = torch.tensor([0.2, 0.7]), torch.tensor([0.0, 1.0])
    loss = loss_class(l1=0.5, l2=0.2, model=model)
    assert (loss.l1, loss.l2, loss.model) == (0.5, 0.2, model)
    loss.l1 = 0.25
    torch.testing.assert_close(loss(output, target), plain(output, target) + 2.5 + 3.0)
    other = nn.Linear(1, 1, bias=False)
    nn.init.constant_(other.weight, 2.0)
    loss.model = other
    assert loss.model is other
    torch.testing.assert_close(loss(output, target), plain(output, target) + 0.5 + 0.4)
    assert list(loss.parameters()) == []
    with pytest.raises(ValueError, match="l2 must be at least 0, not -1"):
        loss.l2 = -1
    assert loss_class().model is None


def test_weights_of_elements() -> None:
    output, target, weight = (
        torch.tensor([0.2, 0.6]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([1.0, 3.0]),
    )
    torch.testing.assert_close(
        BCELossRegularized(weight)(output, target), F.binary_cross_entropy(output, target, weight)
    )
    torch.testing.assert_close(
        MSELossRegularized(weight)(output, target), torch.tensor((0.04 + 3 * 0.16) / 4)
    )


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("padding_idx", [0, 3, -100])
def test_label_smoothing_is_torchs_summed_over_tokens_that_are_no_padding(
    fast, smoothing, padding_idx
) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 7, (4, 5), generator=generator)
    target[0, :3] = padding_idx
    loss = LabelSmoothing(padding_idx, smoothing, fast_xentropy=fast)(x, target)
    kept = target != padding_idx
    expected = F.cross_entropy(x[kept], target[kept], label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss, expected)
    gradient = torch.autograd.grad(loss, x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, x)[0])
    assert gradient[0, :3].abs().max() == 0


@pytest.mark.parametrize("fast", [False, True])
def test_label_smoothing_computes_half_precision_in_float32(fast) -> None:
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    target = torch.arange(6)
    loss = LabelSmoothing(0, 0.1, fast)(x, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, LabelSmoothing(0, 0.1)(x.float(), target))


def test_label_smoothing_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"smoothing must be from 0 to 1, not 1\.5"):
        LabelSmoothing(0, 1.5)
    with pytest.raises(ValueError, match=r"not \(4, 7\) and \(3,\)"):
        LabelSmoothing(0)(torch.zeros(4, 7), torch.zeros(3, dtype=torch.long))


def test_cross_entropy_on_logits_has_the_same_value_and_gradient_as_on_probabilities(model) -> None:
    z = torch.linspace(-6, 6, 9, dtype=torch.float64, requires_grad=True)
    target = (torch.arange(9) % 2).double()
    on_logits = BCELossRegularized(l2=0.2, model=model, logits=True)(z, target)
    on_probabilities = BCELossRegularized(l2=0.2, model=model)(torch.sigmoid(z), target)
    torch.testing.assert_close(on_logits, on_probabilities)
    torch.testing.assert_close(
        torch.autograd.grad(on_logits, z), torch.autograd.grad(on_probabilities, z)
    )


def test_confident_mistakes_keep_their_loss_and_gradient_on_logits() -> None:
    z = torch.tensor([30.0, -200.0], requires_grad=True)
    target = torch.tensor([0.0, 1.0])
    loss = BCELossRegularized(reduction="sum", logits=True)(z, target)
    assert loss.item() == pytest.approx(230.0)
    assert torch.autograd.grad(loss, z)[0].tolist() == [1.0, -1.0]
    # which is what a probability in float32 cannot do
    assert torch.autograd.grad(BCELossRegularized(reduction="sum")(torch.sigmoid(z), target), z)[
        0
    ].tolist() == [0, 0]


@pytest.mark.parametrize(("loss_class", "plain"), CASES)
def test_targets_without_the_last_dimension_of_1_are_no_matrix_of_pairs(loss_class, plain) -> None:
    output, target = torch.tensor([[0.2], [0.7], [0.9]]), torch.tensor([0, 1, 1])
    torch.testing.assert_close(
        loss_class()(output, target), plain(output, target.float().unsqueeze(1))
    )
    with pytest.raises(ValueError, match=r"shape of the output \(3, 1\) .*, not \(2,\)"):
        loss_class()(output, target[:2])
