"""The comparison of AWD-LSTM with the classical way: both are the same model, and the script runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo

import benchmarks
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel

FOLDER = Path(benchmarks.__file__).parent / "micro"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("awd_lstm")
        for name in ("_sections", "awd_lstm"):
            patch.delitem(sys.modules, name)


def test_the_ways_are_one_model(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(input: torch.Tensor, p: float = 0.5, training: bool = True) -> torch.Tensor:
        return input * (torch.arange(input.numel()).view_as(input) % 2 if training else 1)

    torch.manual_seed(0)
    model = LSTMLanguageModel(9, 4, 6, 2, 0.0, 0.0, 0.0, 0.0, wdrop=0.5, tie_weights=True)
    twin = LSTMLanguageModel(9, 4, 6, 2, 0.0, 0.0, 0.0, 0.0, wdrop=0.5, tie_weights=True)
    twin.load_state_dict(model.state_dict())
    classical = script.ClassicalModel(script.with_copies(twin))
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


def test_script_reports_every_way(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    monkeypatch.setattr(script, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(script, "keep_freed_memory", lambda: True)  # there would be no way back
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    script.main(
        ["--vocabulary", "9", "--batch-size", "2", "--bptt", "3", "--steps", "1", "--blocks", "1", "--append-results"]
    )
    out = capsys.readouterr().out
    assert all(f"| {way} |" in out for way in (script.CLASSICAL, script.WRAPPED, script.OURS))
    assert (tmp_path / "RESULTS.md").read_text() == f"# Results\n\n{script.HEADING}\n\n{out.strip()}\n"
