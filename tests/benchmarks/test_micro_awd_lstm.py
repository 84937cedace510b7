"""The comparison of AWD-LSTM with the classical one: both are the same model, and the script
runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mlbench_core.models.pytorch.language_models import LSTMLanguageModel


def test_the_variants_are_one_model(
    micro: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(input: torch.Tensor, p: float = 0.5, training: bool = True) -> torch.Tensor:
        return input * (torch.arange(input.numel()).view_as(input) % 2 if training else 1)

    torch.manual_seed(0)
    model = LSTMLanguageModel(9, 4, 6, 2, 0.0, 0.0, 0.0, 0.0, wdrop=0.5, tie_weights=True)
    twin = LSTMLanguageModel(9, 4, 6, 2, 0.0, 0.0, 0.0, 0.0, wdrop=0.5, tie_weights=True)
    twin.load_state_dict(model.state_dict())
    classical = micro("awd_lstm").ClassicalModel(micro("awd_lstm").with_copies(twin))
    monkeypatch.setattr(torch.nn.functional, "dropout", always)
    words = torch.randint(9, (5, 3))
    expected, _ = model(words, model.init_hidden(3))
    found, _ = classical(words, model.init_hidden(3))
    torch.testing.assert_close(found, expected)
    for scores in (expected, found):
        scores.square().sum().backward()
    ours = sorted(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    theirs = sorted(float(p.grad.norm()) for p in classical.parameters() if p.grad is not None)
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_script_has_a_row_for_every_variant(
    micro: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = micro("awd_lstm")
    monkeypatch.setattr(
        script, "keep_freed_memory", lambda: True
    )  # it would stay on for other tests
    script.main(["--quick", "--vocabulary", "9", "--batch-size", "2", "--save", str(tmp_path)])
    (run,) = micro("_bench").read(tmp_path / "awd_lstm.json")["runs"]
    names = [row["variant"] for row in run["rows"]]
    assert names == [
        script.CLASSICAL,
        "ours, copies of weights",
        "ours",
        script.PRODUCTS,
        script.BOUND,
    ]
    assert all(row["value"] > 0 for row in run["rows"])
