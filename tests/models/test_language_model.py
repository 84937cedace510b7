"""AWD-LSTM and its dropouts against computations written out step by step."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.evaluation.pytorch.criterion import ActivationRegularization
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel
from mlbench_core.models.pytorch.language_models import lstm as lstm_module
from mlbench_core.models.pytorch.layers import dropout_layers
from mlbench_core.models.pytorch.layers.dropout_layers import (
    LockedDropout,
    WeightDrop,
    embedded_dropout,
)

NO_DROPOUT = {"dropout": 0.0, "dropouth": 0.0, "dropouti": 0.0, "dropoute": 0.0}
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device with cuDNN"
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def lstm_by_cells(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """One layer, one time step after the other, gate by gate: outputs (time, batch, width) and the
    last c."""
    outputs = []
    for step in x:
        i, f, g, o = (step @ w_ih.T + h @ w_hh.T + b).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), c


def by_cells(
    model: LSTMLanguageModel, words: Tensor, hidden: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list]:
    """The whole model without dropout, from the state_dict alone."""
    state = model.state_dict()
    x = torch.stack([torch.stack([state["encoder.weight"][word] for word in row]) for row in words])
    ends = []
    for layer, (h, c) in enumerate(hidden):
        w_ih, w_hh, b_ih, b_hh = (
            state[f"rnns.{layer}.module.{name}_l0"]
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        x, c = lstm_by_cells(x, h[0], c[0], w_ih, w_hh, b_ih + b_hh)
        ends.append((x[-1], c))
    return (x @ state["decoder.weight"].T + state["decoder.bias"]).flatten(0, 1), ends


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("nlayers", [1, 3])
def test_equals_a_cell_by_cell_computation(nlayers: int, tie_weights: bool) -> None:
    model = LSTMLanguageModel(17, 6, 9, nlayers, wdrop=0.5, tie_weights=tie_weights).eval()
    words = torch.randint(17, (8, 3))
    hidden = [(torch.randn_like(h), torch.randn_like(c)) for h, c in model.init_hidden(3)]
    scores, ends = model(words, hidden)
    expected, expected_ends = by_cells(model, words, hidden)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    for (h, c), (expected_h, expected_c) in zip(ends, expected_ends, strict=True):
        torch.testing.assert_close(h[0], expected_h, atol=1e-5, rtol=0)
        torch.testing.assert_close(c[0], expected_c, atol=1e-5, rtol=0)


def test_training_with_all_dropouts_equals_the_formula_with_the_masks_it_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = LSTMLanguageModel(11, 4, 5, 2, 0.4, 0.3, 0.6, 0.2, wdrop=0.5, tie_weights=True)
    words, hidden = torch.randint(11, (6, 3)), model.init_hidden(3)
    masks: list[Tensor] = []
    dropout = F.dropout

    def recorded(input: Tensor, p: float = 0.5, *others: object) -> Tensor:
        mask = dropout(torch.ones_like(input), p)
        masks.append(mask)
        return input * mask

    monkeypatch.setattr(F, "dropout", recorded)
    scores, _, raw, outputs = model(words, hidden, return_h=True)
    of_words, of_input, weights_0, of_hidden, weights_1, of_output = masks
    assert of_words.shape == (11, 1)
    assert [mask.shape for mask in (of_input, of_hidden, of_output)] == [
        (1, 3, 4),
        (1, 3, 5),
        (1, 3, 4),
    ]
    state = model.state_dict()
    x = (state["encoder.weight"] * of_words)[words] * of_input
    for layer, weights, mask in ((0, weights_0, of_hidden), (1, weights_1, of_output)):
        lstm = {
            name: state[f"rnns.{layer}.module.{name}_l0"]
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        h = torch.zeros(3, 5 if layer == 0 else 4)
        y, _ = lstm_by_cells(
            x,
            h,
            h,
            lstm["weight_ih"],
            lstm["weight_hh"] * weights,
            lstm["bias_ih"] + lstm["bias_hh"],
        )
        x = y * mask
        torch.testing.assert_close(raw[layer], y, atol=1e-5, rtol=0)
        torch.testing.assert_close(outputs[layer], x, atol=1e-5, rtol=0)
    expected = x @ state["encoder.weight"].T + state["decoder.bias"]
    torch.testing.assert_close(scores, expected.flatten(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("onednn", [False, True])
def test_the_loss_is_the_cross_entropy_of_the_scores(
    onednn: bool, rows: int, tie_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the loss in pieces, with and without a shorter last one, and at once. Two words are
    ignored."""
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(lstm_module, "SCORES_AT_ONCE", 11 * rows)
    model = LSTMLanguageModel(11, 4, 6, 2, 0, 0, 0, 0, tie_weights=tie_weights)
    words, targets = torch.randint(11, (5, 3)), torch.randint(11, (15,))
    targets[[2, 9]] = -100
    scores, _ = model(words, model.init_hidden(3))
    (3 * F.cross_entropy(scores, targets)).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    _, outputs, _ = model.encode(words, model.init_hidden(3))
    loss = model.loss(outputs[-1], targets)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(outputs[-1], targets), loss)
    (3 * loss).backward()
    torch.testing.assert_close(loss, F.cross_entropy(scores, targets))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.loss(outputs[-1], targets), loss, rtol=0.02, atol=0)


def test_the_loss_keeps_the_scores_of_a_piece_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(lstm_module, "SCORES_AT_ONCE", 11 * 4)
    monkeypatch.setattr(
        F, "cross_entropy", lambda *args, **kwargs: sizes.append(args[0].shape) or args[0].sum()
    )
    model = LSTMLanguageModel(11, 4, 6, 2)
    model.loss(torch.zeros(5, 3, 6), torch.zeros(15, dtype=torch.int64))
    assert sizes == [(4, 11), (4, 11), (4, 11), (3, 11)]


def test_the_loss_refuses_second_derivatives() -> None:
    model = LSTMLanguageModel(11, 4, 6, 2)
    loss = model.loss(torch.zeros(5, 3, 6), torch.zeros(15, dtype=torch.int64))
    with pytest.raises(
        RuntimeError,
        match=r"create_graph must be False .* first derivatives only: .* cross_entropy",
    ):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("shape", [(5, 3), (14,), (15, 11)])
def test_targets_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = LSTMLanguageModel(11, 4, 6, 2)
    with pytest.raises(
        ValueError,
        match=rf"targets must have shape \(15,\), .*, not {re.escape(str(shape))}: flatten",
    ):
        model.loss(torch.zeros(5, 3, 6), torch.zeros(shape, dtype=torch.int64))


def test_full_size_has_33_6_million_parameters() -> None:
    with torch.device("meta"):
        model = LSTMLanguageModel(
            33_278, 400, 1150, 3, 0.4, 0.2, 0.65, 0.1, wdrop=0.5, tie_weights=True
        )
    layers = [4 * (i * h + h * h + 2 * h) for i, h in ((400, 1150), (1150, 1150), (1150, 400))]
    assert (
        sum(p.numel() for p in model.parameters())
        == 33_278 * 400 + 33_278 + sum(layers)
        == 33_556_078
    )


def test_evaluation_is_plain_torch_bit_by_bit() -> None:
    model = LSTMLanguageModel(13, 5, 7, 2, 0.5, 0.5, 0.5, 0.5, wdrop=0.5).eval()
    plain = [nn.LSTM(5, 7), nn.LSTM(7, 7)]
    for wrapped, lstm in zip(model.rnns, plain, strict=True):
        lstm.load_state_dict(wrapped.module.state_dict())
    words = torch.randint(13, (9, 4))
    x = model.encoder(words)
    for lstm in plain:
        x, _ = lstm(x)
    scores, _ = model(words, model.init_hidden(4))
    assert torch.equal(scores, model.decoder(x.flatten(0, 1)))
    assert torch.equal(scores, model(words, model.init_hidden(4))[0])


def test_state_carries_over_and_hidden_has_one_pair_a_layer() -> None:
    model = LSTMLanguageModel(13, 5, 7, 3, tie_weights=True).eval().double()
    words = torch.randint(13, (10, 2))
    whole, end = model(words, model.init_hidden(2))
    first, middle = model(words[:4], model.init_hidden(2))
    second, second_end = model(words[4:], middle)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    assert [h.shape for h, _ in end] == [(1, 2, 7), (1, 2, 7), (1, 2, 5)]
    assert end[0][0].dtype == torch.float64
    torch.testing.assert_close(end[2][1], second_end[2][1])
    with pytest.raises(ValueError, match="zip"):
        model(words, middle[:2])


def test_dropped_weights_are_drawn_once_a_pass_and_get_masked_gradients() -> None:
    drop = WeightDrop(nn.LSTM(3, 8), ["weight_hh_l0"], dropout=0.5)
    x, zeros = torch.randn(12, 2, 3), (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    torch.manual_seed(1)
    output, _ = drop(x, zeros)
    torch.manual_seed(1)
    weights = {name: p.detach().clone() for name, p in drop.module.named_parameters()}
    mask = F.dropout(torch.ones_like(weights["weight_hh_l0"]), 0.5)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    for p in weights.values():
        p.requires_grad_()
    bias = weights["bias_ih_l0"] + weights["bias_hh_l0"]
    expected, _ = lstm_by_cells(
        x, zeros[0][0], zeros[1][0], weights["weight_ih_l0"], weights["weight_hh_l0"] * mask, bias
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    upstream = torch.randn_like(output)
    output.backward(upstream)
    expected.backward(upstream)
    for name, p in drop.module.named_parameters():
        torch.testing.assert_close(p.grad, weights[name].grad, atol=1e-5, rtol=1e-4)
    gradient = drop.module.weight_hh_l0.grad
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask > 0] != 0).all()
    torch.manual_seed(2)
    assert not torch.equal(drop(x, zeros)[0], output)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "lstm": (
        lambda: nn.LSTM(3, 3, num_layers=2, bidirectional=True),
        ["weight_hh_l0", "weight_hh_l1_reverse"],
    ),
    "projected": (lambda: nn.LSTM(3, 5, proj_size=2, bias=False), ["weight_hh_l0", "weight_hr_l0"]),
    "gru": (lambda: nn.GRU(3, 3, batch_first=True), ["weight_hh_l0"]),
    "rnn": (lambda: nn.RNN(3, 3), ["weight_ih_l0"]),
    "linear": (lambda: nn.Linear(3, 3), ["weight"]),
    "nested": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), ["0.weight"]),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", MODULES)
def test_weights_of_any_module_can_be_dropped(name: str) -> None:
    make, names = MODULES[name]
    module = make()
    drop = WeightDrop(module, names, dropout=0.5)
    before = {key: value.clone() for key, value in module.state_dict().items()}

    def output(of: nn.Module) -> Tensor:
        result = of(torch.ones(4, 2, 3))
        return result[0] if isinstance(result, tuple) else result

    torch.manual_seed(3)
    found = output(drop)
    torch.manual_seed(3)
    reference = copy.deepcopy(module)
    with torch.no_grad():
        for key in names:
            reference.get_parameter(key).copy_(F.dropout(reference.get_parameter(key), 0.5))
    assert torch.equal(found, output(reference))
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    found.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert torch.equal(output(drop.eval()), output(module))


def test_packed_sequences_and_exceptions_leave_the_module_as_it_was() -> None:
    drop = WeightDrop(nn.LSTM(3, 4), ["weight_hh_l0"], dropout=0.5)
    own = drop.module._flat_weights
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(5, 2, 3), torch.tensor([5, 2]))
    output, _ = drop(packed)
    assert output.data.shape == (7, 4)
    with pytest.raises(RuntimeError):
        drop(torch.ones(5, 2, 9))
    assert drop.module._flat_weights is own
    assert all(weight is p for weight, p in zip(own, drop.module.parameters(), strict=True))


def test_copies_and_states_are_independent_and_old_states_load() -> None:
    model = LSTMLanguageModel(13, 5, 7, 2, **NO_DROPOUT, wdrop=0.5, tie_weights=True)
    words = torch.randint(13, (6, 2))
    scores, _ = model(words, model.init_hidden(2))
    twin = copy.deepcopy(model)
    assert twin.decoder.weight is twin.encoder.weight
    assert list(model.state_dict()) == [
        "encoder.weight",
        *(
            f"rnns.{i}.module.{name}_l0"
            for i in (0, 1)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ),
        "decoder.weight",
        "decoder.bias",
    ]
    old = {
        key.replace("weight_hh_l0", "weight_hh_l0_raw"): value
        for key, value in model.state_dict().items()
    }
    fresh = LSTMLanguageModel(13, 5, 7, 2, **NO_DROPOUT, wdrop=0.5, tie_weights=True)
    fresh.load_state_dict(old)
    for other in (twin, fresh):
        torch.manual_seed(5)
        expected, _ = model(words, model.init_hidden(2))
        torch.manual_seed(5)
        assert torch.equal(other(words, other.init_hidden(2))[0], expected)
    with torch.no_grad():
        twin.encoder.weight.zero_()
    assert model.encoder.weight.abs().sum() > 0
    scores.sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == set()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's compiler looks at it
def test_compiles() -> None:
    model = LSTMLanguageModel(13, 5, 7, 2, **NO_DROPOUT, wdrop=0.5)
    words = torch.randint(13, (6, 2))
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(5)
    expected, _ = model(words, model.init_hidden(2))
    torch.manual_seed(5)
    scores, _ = compiled(words, model.init_hidden(2))
    torch.testing.assert_close(scores, expected)
    torch._dynamo.reset()


def test_locked_dropout_draws_once_for_all_times() -> None:
    drop, x = LockedDropout(p=0.3), torch.randn(9, 20, 30)
    y = drop(x)
    mask = y / x
    torch.testing.assert_close(mask, mask[:1].expand_as(mask))
    assert (mask[0] == 0).double().mean().item() == pytest.approx(0.3, abs=0.08)
    torch.testing.assert_close(
        mask[0][mask[0] != 0], torch.full((int((mask[0] != 0).sum()),), 1 / 0.7)
    )
    assert not torch.equal(drop(x), y)
    assert drop.eval()(x) is x
    assert LockedDropout(0)(x) is x
    assert (LockedDropout(1.0)(x) == 0).all()


def test_embedded_dropout_drops_words_everywhere_and_scales_the_others() -> None:
    embed = nn.Embedding(50, 4)
    words = torch.randint(50, (30, 20))
    y = embedded_dropout(embed, words, dropout=0.4)
    factors = (y / embed(words))[..., 0]
    torch.testing.assert_close(y, embed(words) * factors.unsqueeze(-1))
    seen = [factors[words == word].round(decimals=4).unique().tolist() for word in range(50)]
    assert all(len(values) == 1 for values in seen)
    assert sorted({round(values[0], 3) for values in seen}) == [0.0, 1.667]
    assert torch.equal(embedded_dropout(embed, words, dropout=0), embed(words))
    scale = torch.rand(50, 1)
    torch.testing.assert_close(
        embedded_dropout(embed, words, 0, scale), embed(words) * scale[words]
    )
    per_feature = torch.rand(4)
    torch.testing.assert_close(
        embedded_dropout(embed, words, 0, per_feature), embed(words) * per_feature
    )


@pytest.mark.parametrize("padding_idx", [None, 0, 4])
def test_every_word_but_padding_gets_its_gradient(padding_idx: int | None) -> None:
    embed = nn.Embedding(5, 2, padding_idx=padding_idx)
    embedded_dropout(embed, torch.tensor([0, 1, 2, 3, 4, 4]), dropout=1e-9).sum().backward()
    assert embed.weight.grad is not None
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0])
    if padding_idx is not None:
        expected[padding_idx] = 0.0
    torch.testing.assert_close(embed.weight.grad[:, 0], expected)


def test_gradients_of_embedded_dropout_are_those_of_the_masked_matrix() -> None:
    embed, words = nn.Embedding(9, 3), torch.randint(9, (4, 5))
    torch.manual_seed(1)
    y = embedded_dropout(embed, words, dropout=0.5)
    torch.manual_seed(1)
    mask = F.dropout(torch.ones(9, 1), 0.5)
    weight = embed.weight.detach().clone().requires_grad_()
    expected = F.embedding(words, weight * mask)
    assert torch.equal(y, expected)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(embed.weight.grad, weight.grad)


def test_activation_regularization_is_as_defined() -> None:
    dropped, raw = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    changes = sum(float(((raw[t + 1] - raw[t]) ** 2).sum()) for t in range(4)) / 24
    expected = 2 * float((dropped**2).sum()) / 30 + 1 * changes
    assert ActivationRegularization()(dropped, raw).item() == pytest.approx(expected, rel=1e-5)
    assert ActivationRegularization(alpha=0, beta=0)(dropped, raw).item() == 0
    assert torch.isfinite(ActivationRegularization()(dropped[:1], raw[:1]))
    with pytest.raises(ValueError, match="beta must be at least 0, not -1"):
        ActivationRegularization(beta=-1)


def test_bad_arguments_are_named() -> None:
    for call, message in [
        (lambda: LSTMLanguageModel(0, 4, 4, 1), "ntoken must be at least 1, not 0"),
        (lambda: LSTMLanguageModel(4, 4, 4, 1, wdrop=1.5), "wdrop must be from 0 to 1, not 1.5"),
        (
            lambda: LSTMLanguageModel(4, 4, 4, 1, dropouti=-0.1),
            "dropouti must be from 0 to 1, not -0.1",
        ),
        (lambda: LockedDropout(2), "p must be from 0 to 1, not 2"),
        (
            lambda: embedded_dropout(nn.Embedding(2, 2), torch.zeros(1, dtype=torch.long), 1.1),
            "dropout must be from 0 to 1, not 1.1",
        ),
        (
            lambda: WeightDrop(nn.LSTM(2, 2), ["weight_hh"]),
            r"must be a list of some of weight_ih_l0.*, not \['weight_hh'\]",
        ),
        (lambda: WeightDrop(nn.LSTM(2, 2), "weight_hh_l0"), "must be a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_learns_a_repeating_text_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = LSTMLanguageModel(6, 8, 16, 2, 0.1, 0.1, 0.1, 0.0, wdrop=0.2, tie_weights=True)
    text = torch.arange(6).repeat(3)[:13].unsqueeze(1).repeat(1, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        scores, _ = model(text[:-1], model.init_hidden(4))
        loss = F.cross_entropy(scores, text[1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 < 1.5 < losses[0]
    assert capsys.readouterr() == ("", "")


def test_weights_packed_for_cudnn_share_a_buffer_and_leave_the_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for the one call that needs a GPU: it moves tensors into one buffer, as
    cuDNN's does."""
    calls = []

    def flatten(weights: list[Tensor], per_layer: int, *others: object) -> None:
        calls.append((len(weights), per_layer, others))
        buffer, start = torch.cat([weight.flatten() for weight in weights]), 0
        for weight in weights:
            shape = weight.shape
            weight.set_(buffer[start : start + shape.numel()].view(shape))
            start += shape.numel()

    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", flatten)
    monkeypatch.setattr("torch.backends.cudnn.rnn.get_cudnn_mode", {"LSTM": 2}.get)
    monkeypatch.setattr(dropout_layers, "_runs_on_cudnn", lambda weights: True)
    plain = WeightDrop(nn.LSTM(3, 4), ["weight_hh_l0"], dropout=0.5)
    twin, x = copy.deepcopy(plain), torch.randn(5, 2, 3)
    places = [p.data_ptr() for p in plain.parameters()]
    torch.manual_seed(4)
    output, _ = plain(x)
    again, _ = plain(x)  # a second pass before the first one's gradients
    (output.sum() + 2 * again.sum()).backward()
    monkeypatch.setattr(dropout_layers, "_runs_on_cudnn", lambda weights: False)
    torch.manual_seed(4)
    expected, expected_again = twin(x)[0], twin(x)[0]
    (expected.sum() + 2 * expected_again.sum()).backward()
    assert torch.equal(output, expected)
    assert torch.equal(again, expected_again)
    for p, q in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        assert torch.equal(p, q)
    assert [p.data_ptr() for p in plain.parameters()] == places
    assert calls == [(4, 4, (3, 2, 4, 0, 1, False, False))] * 2


@needs_gpu
@pytest.mark.gpu
def test_on_a_gpu_like_on_a_cpu_without_the_warning_about_flattening() -> None:
    drop = WeightDrop(nn.LSTM(6, 8), ["weight_hh_l0"], dropout=0.5)
    on_gpu = copy.deepcopy(drop).cuda()
    x = torch.randn(7, 3, 6)
    mask = (torch.rand(32, 8) < 0.5).float() * 2
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(F, "dropout", lambda weight, p: weight * mask.to(weight.device))
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        outputs = [drop(x)[0], on_gpu(x.cuda())[0]]
        for output in outputs:
            output.square().sum().backward()
    torch.testing.assert_close(outputs[1].cpu(), outputs[0], atol=1e-4, rtol=1e-3)
    for p, q in zip(drop.parameters(), on_gpu.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, atol=1e-4, rtol=1e-3)
