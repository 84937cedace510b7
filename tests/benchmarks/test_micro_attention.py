"""The scripts that time the CUDA kernels: their arithmetic, and toy runs of them on the CPU."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

import benchmarks
from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.models.pytorch.transformer import TransformerConfig

FOLDER = Path(benchmarks.__file__).parent / "micro"
SCRIPTS = ("attention", "attention_score", "transformer_losses")
NAMES = ("_sections", "_gpu", "_attention_batch", "_attention_ways", *SCRIPTS)
CPU = torch.device("cpu")
TINY = {"embed_dim": 16, "ffn_embed_dim": 16, "layers": 1, "attention_heads": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for one another longer than these small tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def micro() -> Iterator[SimpleNamespace]:
    """The modules of the folder, which find one another by lying in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name.lstrip("_"): importlib.import_module(name) for name in NAMES})
        for name in NAMES:
            patch.delitem(sys.modules, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_scripts_say_so_and_end(
    micro: SimpleNamespace, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    getattr(micro, name).main([])
    assert capsys.readouterr().out == (
        f"{name}.py: nothing measured, torch finds no CUDA GPU here. `--device cpu` tries the script itself.\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_training_without_a_gpu_has_to_be_asked_for(micro: SimpleNamespace) -> None:
    parse = micro.transformer_losses.parse
    assert (parse([]).device, parse([]).steps) == ("cuda", 200)
    assert (parse(["--steps", "3"]).device, parse(["--steps", "3"]).steps) == ("cpu", 3)


def test_costs_are_those_counted_by_hand(micro: SimpleNamespace) -> None:
    core, module = micro.attention_batch.core_cost, micro.attention_batch.module_cost
    tensor, statistics = 8192 * 1024 * 2, 8192 * 16 * 4  # 16.8 MB, and float32 for each query and head
    whole = [64] * 128
    assert core(whole, False).bytes == 4 * tensor + statistics
    assert core(whole, True).bytes == 11 * tensor + 2 * statistics
    assert core(whole, False).flops == 2 * (2 * 128 * 16 * 64 * 64 * 64)
    assert core(whole, True).flops == 7 * (2 * 128 * 16 * 64 * 64 * 64)
    assert core([2, 3], False).flops == 2 * (2 * 16 * 64 * (4 + 9))  # only tokens count
    projections = 2 * 8192 * 1024 * 4096
    assert module(whole, False).flops == core(whole, False).flops + projections
    assert module(whole, True).flops == core(whole, True).flops + 3 * projections
    # Forward: x, Q K V, O and y; weights. Backward: dy, O, dO, dQ dK dV, x and dx; weights and their gradients.
    weights = 4 * 1024 * 1024 * 2
    assert module(whole, False).bytes == core(whole, False).bytes + 6 * tensor + weights
    assert module(whole, True).bytes == core(whole, True).bytes + 14 * tensor + 3 * weights


def test_bytes_of_the_score(micro: SimpleNamespace) -> None:
    operands, scores = 2 * (128 * 100 * 1024 + 2 * 1024), 4 * 128 * 50 * 50
    assert micro.attention_score.least_bytes(128, 50, 50, 1024, False) == operands + scores
    assert micro.attention_score.least_bytes(128, 50, 50, 1024, True) == 3 * operands + 2 * scores


def test_layouts_come_back_with_zeros_at_padding(micro: SimpleNamespace) -> None:
    batch = micro.attention_batch.make_batch(6, 30, True, CPU, seed=0)
    assert batch.lengths.tolist()[0] == 6
    assert 3 <= batch.shortest == min(batch.lengths.tolist()) < 6
    assert batch.starts.diff().tolist() == batch.lengths.tolist()
    assert torch.equal(batch.real.sum(dim=1), batch.lengths)
    x = torch.randn(5, 6, 2, 3)
    expected = x * batch.real[:, :, None, None]
    for layout in ("batch first", "time first", "packed"):
        assert torch.equal(batch.take(batch.put(x, layout), layout), expected)
    assert micro.attention_batch.make_batch(6, 30, False, CPU, seed=0).padding is None


@pytest.mark.parametrize("part", ["core", "module"])
def test_the_probe_counts_dropped_weights(micro: SimpleNamespace, part: str) -> None:
    """A way that drops what this test says, for more keys than a head has features."""
    length, features = 70, 64
    batch = micro.attention_batch.make_batch(length, 2 * length, True, CPU, seed=1)
    tokens = batch.lengths.tolist()
    weights = torch.ones(2, 16, length, length) / length
    weights[0, 3, 5, 1] = weights[1, 15, 0, :] = weights[0, :, :, 66] = 0.0
    gone = total = 0
    for first in (0, features):
        leaves = micro.attention_batch.probe_leaves(part, batch, torch.float32, first)
        value = leaves[2] if part == "core" else leaves[0].unflatten(-1, (16, features))
        output = (weights @ value.transpose(1, 2)).transpose(1, 2)
        found, of = micro.attention_batch.dropped(batch, batch.take(output, "batch first"), first)
        gone, total = gone + found, total + of
    assert total == 16 * (tokens[0] ** 2 + tokens[1] ** 2)
    assert gone == 1 + tokens[1] + 16 * tokens[0]


def test_ways_agree_with_float64(micro: SimpleNamespace) -> None:
    script = micro.attention
    case = script.Case(5, torch.float16, 0.5, padded=True)
    batch = micro.attention_batch.make_batch(5, 20, True, CPU, seed=0)
    found = script.qualities(script.core_ways(), batch, case)
    assert set(found["ours"]) == {"drop_rate", "output_error", "gradient_error"}
    for title in ("ours", "ours, packed rows", "products and softmax of nn.MultiheadAttention", "plain reference"):
        assert found[title]["output_error"] < 3e-3, title
        assert found[title]["gradient_error"] < 5e-3, title
        assert abs(found[title]["drop_rate"] - 0.5) < 0.1, title
    assert found["torch's varlen_attn"] == {"refused": "varlen_attn has no dropout"}


def test_times_are_ratios_within_a_block(micro: SimpleNamespace) -> None:
    ours = micro.gpu.Timing({"gpu": [1.0, 2.0, 4.0]})
    rival = micro.gpu.Timing({"gpu": [3.0, 4.0, 4.0], "wall": [9.0]})
    assert micro.gpu.times(rival, ours, "gpu") == (2.0, 1.0, 3.0)
    assert micro.gpu.times(rival, ours, "graph") is None
    assert micro.gpu.timing_columns(rival, ours) == {
        "wall_us": 9e6, "gpu_us": 4e6, "graph_us": None,
        "gpu_times": 2.0, "gpu_times_least": 1.0, "gpu_times_most": 3.0,
    }  # fmt: skip
    assert [micro.gpu.verdict(1.5, aim) for aim in (1.5, 1.6, None)] == [
        "1.50 (target 1.5: reached)", "1.50 (target 1.6: missed)", "1.50",
    ]  # fmt: skip


def test_the_fastest_rival_of_a_kind_is_held_against_the_target(micro: SimpleNamespace) -> None:
    def row(rival: str, length: int, times: float, **others: object) -> dict[str, object]:
        base = {"part": "core", "rival": rival, "length": length, "pass": micro.attention.BOTH}
        return base | {"gpu_times": times, "gpu_us": 10 * times} | others

    rows = [
        row("b", 28, 1.4), row("b", 28, 2.0), row("c", 28, 3.0), row("c", 80, 1.7), row("c", 48, 2.5),
        row("a", 80, 5.0),
        {"part": "core", "rival": "b", "length": 80, "pass": micro.attention.BOTH, "refused": "no mask"},
        row("b", 28, 0.1, **{"pass": micro.attention.FORWARD}),
    ]  # fmt: skip
    table = [line.split(" | ") for line in micro.attention.ratio_table(rows, "gpu").splitlines()]
    assert table[0][2:] == ["28 positions", "48 positions", "80 positions |"]
    cells = {line[1][:3]: line[2:] for line in table[2:6]}
    assert cells["(a)"][2] == "5.00 (target 4: reached) |"
    assert cells["(b)"] == ["1.40 (target 1.5: missed)", "", " |"]
    assert cells["(c)"] == ["3.00 (target 3: reached)", "2.50", "1.70 (target 1.8: missed) |"]


def test_ways_take_turns_and_refusals_are_told(micro: SimpleNamespace) -> None:
    calls: list[str] = []

    def fail() -> None:
        raise RuntimeError("no kernel for this\nand more")

    ways = {name: micro.gpu.Work([lambda name=name: calls.append(name)]) for name in "ab"}
    timings, refused = micro.gpu.measure(ways | {"c": micro.gpu.Work([fail])}, CPU, blocks=2, rounds=1)
    assert calls == ["a"] * 3 + ["b"] * 3 + ["b", "a", "a", "b"]
    assert refused == {"c": "no kernel for this"}
    assert [len(timings[name].seconds["wall"]) for name in "ab"] == [2, 2]
    assert set(timings["a"].seconds) == {"wall"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_clocks_of_the_gpu_and_work_that_no_graph_can_hold(micro: SimpleNamespace) -> None:
    x = torch.randn(1 << 24, device="cuda")
    ways = {"copy": micro.gpu.Work([x.clone, x.clone]), "waits": micro.gpu.Work([lambda: x.sum().item()])}
    timings, refused = micro.gpu.measure(ways, torch.device("cuda", 0), blocks=3, rounds=5)
    assert refused == {}
    assert set(timings["copy"].seconds) == {"wall", "gpu", "graph"}
    assert set(timings["waits"].seconds) == {"wall", "gpu"}
    assert "graph" in timings["waits"].notes
    kept = torch.nn.functional.dropout(x, 0.5)  # random numbers are to be had again
    assert 0.4 < float((kept == 0).double().mean()) < 0.6
    again, _ = micro.gpu.measure({"dropout": micro.gpu.Work([lambda: torch.nn.functional.dropout(x)])},
                                 torch.device("cuda", 0), blocks=1, rounds=1)  # fmt: skip
    assert "graph" in again["dropout"].seconds


def test_toy_runs_write_tables_and_plots(
    micro: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in TINY.items()}
    tiny = SimpleNamespace(preset=lambda name, **changes: TransformerConfig.preset(name, **changes, **sizes))
    monkeypatch.setattr(micro.transformer_losses, "TransformerConfig", tiny)
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    common = ["--device", "cpu", "--output", str(tmp_path), "--append-results"]
    blocks = ["--blocks", "1", "--rounds", "1"]
    arguments = {
        "attention": ["--tokens", "8", "--lengths", "4", "--parts", "core", "--dtypes", "bfloat16",
                      "--dropout", "0.1", "--padding", "with", *blocks],
        "attention_score": ["--batch-size", "1", "--features", "8", "--lengths", "3", "--dtypes", "bfloat16",
                            "--without-compiler", *blocks],
        "transformer_losses": ["--steps", "2", "--tokens", "16", "--dtype", "bfloat16", "--vocabulary", "5"],
    }  # fmt: skip
    for name, options in arguments.items():
        monkeypatch.setattr(getattr(micro, name), "RESULTS", tmp_path / "RESULTS.md")
        getattr(micro, name).main([*options, *common])
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    printed, results = capsys.readouterr().out, (tmp_path / "RESULTS.md").read_text()
    assert printed.count(micro.gpu.CPU_NOTE) == 3
    assert all(getattr(micro, name).HEADING in results for name in arguments)
    with (tmp_path / "attention.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 11  # passes, ways
    assert {row["pass"] for row in rows} == {"forward", "forward + backward"}
    ours = [row for row in rows if row["title"] == "ours"]
    assert all(float(row["wall_us"]) > 0 and float(row["wall_times"]) == 1 and not row["refused"] for row in ours)
    assert "Largest difference of two losses, kernel and fused" in results


def test_made_up_pairs_are_padded_and_shifted(micro: SimpleNamespace) -> None:
    words = Dictionary(symbols=[f"w{i}_" for i in range(50)])
    batches = micro.transformer_losses.made_up_batches(words, 200, 3, CPU)
    translation: dict[int, int] = {}
    for batch in (next(batches) for _ in range(4)):
        inputs, target = batch["net_input"], batch["target"]
        lengths = inputs["src_lengths"].tolist()
        assert batch["ntokens"] == sum(lengths) == int((target != words.pad()).sum())
        for row, length in enumerate(lengths):
            source = inputs["src_tokens"][row].tolist()
            assert set(source[:-length]) <= {words.pad()}
            assert source[-1] == target[row, length - 1] == inputs["prev_output_tokens"][row, 0] == words.eos()
            assert torch.equal(inputs["prev_output_tokens"][row, 1:length], target[row, : length - 1])
            for word, other in zip(source[-length:-1], target[row].tolist(), strict=False):
                assert translation.setdefault(word, other) == other > 1
    assert len(set(translation.values())) == len(translation)


def test_conclusion_compares_with_what_torchs_ways_differ(micro: SimpleNamespace) -> None:
    curves = {"kernel": [5.0, 4.0, 3.25], "fused": [5.0, 4.5, 3.0], "reference": [5.0, 4.25, 3.0]}
    assert micro.transformer_losses.conclusion(curves).splitlines() == [
        "Largest difference of two losses, fused and reference: 2.50e-01 (step 2).",
        "Largest difference of two losses, kernel and fused: 5.00e-01 (step 2), 2.00 times that.",
        "Largest difference of two losses, kernel and reference: 2.50e-01 (step 2), 1.00 times that.",
    ]
