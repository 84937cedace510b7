"""The scripts that time the CUDA kernels: their arithmetic, and toy runs of them on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

CPU = torch.device("cpu")


def test_costs_are_those_counted_by_hand(micro: Callable[[str], ModuleType]) -> None:
    core, module = micro("_attention_batch").core_cost, micro("_attention_batch").module_cost
    # 16.8 MB, and float32 for each query and head
    tensor, statistics = 8192 * 1024 * 2, 8192 * 16 * 4
    whole = [64] * 128
    assert core(whole, False).bytes == 4 * tensor + statistics
    assert core(whole, True).bytes == 11 * tensor + 2 * statistics
    assert core(whole, False).flops == 2 * (2 * 128 * 16 * 64 * 64 * 64)
    assert core(whole, True).flops == 7 * (2 * 128 * 16 * 64 * 64 * 64)
    assert core([2, 3], False).flops == 2 * (2 * 16 * 64 * (4 + 9))  # only tokens count
    projections = 2 * 8192 * 1024 * 4096
    assert module(whole, False).flops == core(whole, False).flops + projections
    assert module(whole, True).flops == core(whole, True).flops + 3 * projections
    # Forward: x, Q K V, O and y; weights. Backward: dy, O, dO, dQ dK dV, x and dx; weights and
    # their gradients.
    weights = 4 * 1024 * 1024 * 2
    assert module(whole, False).bytes == core(whole, False).bytes + 6 * tensor + weights
    assert module(whole, True).bytes == core(whole, True).bytes + 14 * tensor + 3 * weights


def test_bytes_of_the_score(micro: Callable[[str], ModuleType]) -> None:
    operands, scores = 2 * (128 * 100 * 1024 + 2 * 1024), 4 * 128 * 50 * 50
    assert micro("attention_score").least_bytes(128, 50, 50, 1024, False) == operands + scores
    assert (
        micro("attention_score").least_bytes(128, 50, 50, 1024, True) == 3 * operands + 2 * scores
    )


def test_layouts_come_back_with_zeros_at_padding(micro: Callable[[str], ModuleType]) -> None:
    batch = micro("_attention_batch").make_batch(6, 30, True, CPU, seed=0)
    assert batch.lengths.tolist()[0] == 6
    assert 3 <= batch.shortest == min(batch.lengths.tolist()) < 6
    assert batch.starts.diff().tolist() == batch.lengths.tolist()
    assert torch.equal(batch.real.sum(dim=1), batch.lengths)
    x = torch.randn(5, 6, 2, 3)
    expected = x * batch.real[:, :, None, None]
    for layout in ("batch first", "time first", "packed"):
        assert torch.equal(batch.take(batch.put(x, layout), layout), expected)
    assert micro("_attention_batch").make_batch(6, 30, False, CPU, seed=0).padding is None


@pytest.mark.parametrize("part", ["core", "module"])
def test_the_probe_counts_dropped_weights(micro: Callable[[str], ModuleType], part: str) -> None:
    """A way that drops what this test says, for more keys than a head has features."""
    length, features = 70, 64
    batch = micro("_attention_batch").make_batch(length, 2 * length, True, CPU, seed=1)
    tokens = batch.lengths.tolist()
    weights = torch.ones(2, 16, length, length) / length
    weights[0, 3, 5, 1] = weights[1, 15, 0, :] = weights[0, :, :, 66] = 0.0
    gone = total = 0
    for first in (0, features):
        leaves = micro("_attention_batch").probe_leaves(part, batch, torch.float32, first)
        value = leaves[2] if part == "core" else leaves[0].unflatten(-1, (16, features))
        output = (weights @ value.transpose(1, 2)).transpose(1, 2)
        found, of = micro("_attention_batch").dropped(
            batch, batch.take(output, "batch first"), first
        )
        gone, total = gone + found, total + of
    assert total == 16 * (tokens[0] ** 2 + tokens[1] ** 2)
    assert gone == 1 + tokens[1] + 16 * tokens[0]


def test_variants_agree_with_float64(micro: Callable[[str], ModuleType]) -> None:
    script = micro("attention")
    case = script.Case(5, torch.float16, 0.5, padded=True)
    batch = micro("_attention_batch").make_batch(5, 20, True, CPU, seed=0)
    found = script.qualities(script.core_variants(), batch, case)
    assert set(found["ours"]) == {"dropped", "error", "error of gradients"}
    for title in (
        "ours",
        "(a) products and softmax of nn.MultiheadAttention",
        "(d) plain reference",
    ):
        assert found[title]["error"] < 3e-3, title
        assert found[title]["error of gradients"] < 5e-3, title
        assert abs(found[title]["dropped"] - 0.5) < 0.1, title
    assert found["(c) torch's varlen_attn"] == {"refused": "varlen_attn has no dropout"}


def test_work_that_is_refused_is_reported_with_the_warnings_of_torch(
    micro: Callable[[str], ModuleType],
) -> None:
    gpu, calls = micro("_gpu"), []
    clocks = gpu.Clocks(gpu.Work([lambda: calls.append(1)]), CPU, 2)
    assert clocks().seconds > 0
    assert len(calls) == 3 + 2  # the warm-up, and two rounds

    def fail() -> None:
        raise RuntimeError("no kernel for this\nand more")

    with pytest.raises(RuntimeError, match=r"^no kernel for this$"):
        gpu.Clocks(gpu.Work([fail]), CPU, 1)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_clocks_of_the_gpu_and_work_that_no_graph_can_hold(
    micro: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, device = micro("_gpu"), torch.device("cuda", 0)
    x = torch.randn(1 << 24, device="cuda")
    assert set(gpu.Clocks(gpu.Work([x.clone, x.clone]), device, 5)().extra) == {
        "wall µs",
        "graph µs",
    }
    assert set(gpu.Clocks(gpu.Work([lambda: x.sum().item()]), device, 5)().extra) == {"wall µs"}
    assert "no graph: " in capsys.readouterr().err
    kept = torch.nn.functional.dropout(
        x, 0.5
    )  # the generator works again after the capture that failed
    assert 0.4 < float((kept == 0).double().mean()) < 0.6
    again = gpu.Clocks(gpu.Work([lambda: torch.nn.functional.dropout(x)]), device, 1)()
    assert "graph µs" in again.extra


def test_quick_runs_on_the_cpu(micro: Callable[[str], ModuleType], tmp_path: Path) -> None:
    found = {}
    for name in ("attention", "attention_score"):
        micro(name).main(["--quick", "--device", "cpu", "--save", str(tmp_path)])
        found[name] = micro("_bench").read(tmp_path / f"{name}.json")["runs"][0]["rows"]
    assert len(found["attention"]) == 2 * 10  # passes, variants
    ours = [row for row in found["attention"] if row["variant"] == "ours"]
    assert all(row["ratios"]["ours"][0] == 1 for row in ours)
    # A CPU does not have all backends.
    assert any("error" in row for row in found["attention"])
    variants = {row["variant"] for row in found["attention_score"]}
    assert variants == {"ours", "plain torch", "blocked, tanh computed again"}
