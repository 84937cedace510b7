"""LSTMs within autocast, on processors with and without the instructions that oneDNN needs for
them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from mlbench_core.models.pytorch import autocast
from mlbench_core.models.pytorch.autocast import AutocastLSTM
from mlbench_core.models.pytorch.layers.dropout_layers import WeightDrop
from tests.helpers.processes import environment

TRAIN_BOTH = """
import json
import logging

import torch

from mlbench_core.models.pytorch.gnmt import GNMT
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("mlbench_core").addHandler(handler)

torch.manual_seed(0)
gnmt = GNMT(20, hidden_size=8, num_layers=3, dropout=0.0)
lstm = LSTMLanguageModel(11, 4, 6, 2, wdrop=0.5)
words, lengths = torch.randint(4, 11, (5, 3)), torch.tensor([5, 4, 5])
expected = gnmt(words, lengths, words)
losses, errors = [], []
for precision in (torch.bfloat16, torch.float16):
    with torch.autocast("cpu", precision):
        scores = gnmt(words, lengths, words)
        predicted, hidden = lstm(words, lstm.init_hidden(3))
        predicted, _ = lstm(words, hidden)
        loss = scores.float().logsumexp(-1).sum() + predicted.float().logsumexp(-1).sum()
    loss.backward()
    with torch.no_grad(), torch.autocast("cpu", precision):
        gnmt.eval()(words, lengths, words)
        gnmt.train()
    errors.append(((scores - expected).abs().max() / expected.abs().max()).item())
gradients = [parameter.grad for model in (gnmt, lstm) for parameter in model.parameters()]
finite = all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
print(json.dumps({"messages": messages, "errors": errors, "finite": bool(finite)}))
"""


def test_models_with_lstms_train_within_autocast_without_avx_512() -> None:
    # Without the limit, torch may know more instructions than the processor of another reader has.
    run = subprocess.run(
        [sys.executable, "-c", TRAIN_BOTH], env=environment(ONEDNN_MAX_CPU_ISA="AVX2"),
         capture_output=True, text=True,
        timeout=240, check=True,
    )  # fmt: skip
    found = json.loads(run.stdout)
    assert found["finite"]
    assert max(found["errors"]) < 0.05
    # One message for each dtype, however many LSTMs and modes there are.
    assert [message.split(":")[0] for message in found["messages"]] == [
        f"LSTMs are computed in float32, not in {name}, which this processor does not support"
        for name in ("bfloat16", "float16")
    ]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "_autocast_has_lstm", lambda *mode: False)


@pytest.mark.usefixtures("refused")
def test_a_refused_dtype_gives_the_bits_of_float32() -> None:
    torch.manual_seed(0)
    lstm, x, state = (
        AutocastLSTM(3, 4),
        torch.randn(5, 2, 3),
        (torch.randn(1, 2, 4), torch.randn(1, 2, 4)),
    )
    packed = pack_padded_sequence(x, torch.tensor([5, 3]))
    dropped = WeightDrop(lstm, ["weight_hh_l0"], dropout=0.0)
    expected = [lstm(x), lstm(x, state), lstm(packed), dropped(x, state)]
    with torch.autocast("cpu", torch.bfloat16):
        halves = tuple(part.bfloat16() for part in state)
        found = [lstm(x), lstm(x, state), lstm(packed), dropped(x, state)]
        from_halves = lstm(x.bfloat16(), halves)
    for (output, states), (wanted, wanted_states) in zip(found, expected, strict=True):
        data, wanted_data = (
            out if isinstance(out, torch.Tensor) else out.data for out in (output, wanted)
        )
        assert torch.equal(data, wanted_data)
        assert all(map(torch.equal, states, wanted_states))
    rounded = lstm(x.bfloat16().float(), tuple(half.float() for half in halves))
    assert torch.equal(from_halves[0], rounded[0])


def test_the_probe_draws_no_random_numbers() -> None:
    autocast._autocast_has_lstm.cache_clear()
    before = torch.get_rng_state()
    autocast._autocast_has_lstm(torch.bfloat16, True, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_autocast_it_is_the_lstm_of_torch() -> None:
    torch.manual_seed(0)
    own, x = AutocastLSTM(3, 4, bidirectional=True), torch.randn(5, 2, 3)
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4, bidirectional=True)
    assert torch.equal(own(x)[0], plain(x)[0])
    assert own.state_dict().keys() == plain.state_dict().keys()
