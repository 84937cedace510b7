"""Task 1a's training steps as CUDA graphs: the same numbers as without them."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.models.pytorch.autocast import Float32Output
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.tasks import get_task

spec = importlib.util.spec_from_file_location(
    "cuda_graphs", get_task("1a").script.with_name("cuda_graphs.py")
)
assert spec is not None and spec.loader is not None
cuda_graphs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda_graphs)


def train(network: nn.Module, model: nn.Module, sizes: list[int]) -> list[Tensor]:
    """Take a step on random images for each size; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(1), []
    for size in sizes:
        images = (
            torch.randn(size, 3, 32, 32, generator=generator)
            .cuda()
            .to(memory_format=torch.channels_last)
        )
        loss = F.cross_entropy(network(images), torch.arange(size, device="cuda") % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_graphs_train_as_the_plain_network(
    autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    plain = get_resnet_model("resnet20", 1, "fp32", num_classes=10, use_cuda=True).to(
        memory_format=torch.channels_last
    )
    captured = copy.deepcopy(plain)
    graphed = cuda_graphs.GraphedNetwork(captured)
    sizes = [32, 32, 32, 12, 32]  # the first batch is captured; the fourth has another size
    expected = train(Float32Output(plain, autocast), plain, sizes)
    found = train(Float32Output(graphed, autocast), captured, sizes)
    # Each step makes a difference in rounding a few times as large.
    tolerance = 1e-3 if autocast is None else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(captured.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=10 * tolerance)
    images = torch.zeros(32, 3, 32, 32, device="cuda")
    assert torch.equal(graphed.eval()(images), captured(images))
