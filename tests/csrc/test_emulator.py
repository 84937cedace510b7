"""The emulator that runs CUDA kernels on the host does what a GPU does, and finds what a GPU would forgive."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.helpers.cuda_host import compile_host, pointer


def test_first(tmp_path: Path) -> None:
    source = tmp_path / "host.cpp"
    source.write_text(
        '#include "common/launch.cuh"\n#include "common/mma.cuh"\nnamespace { struct P { int* out; }; __global__ void k(P p) { p.out[blockIdx.x * blockDim.x + threadIdx.x] = static_cast<int>(blockIdx.x * 1000 + threadIdx.x); } }\nextern "C" void indices(int* out) { mlbench::launch(k, mlbench::Dim3{3}, 40, 0, {}, {out}); }'
    )
    out = torch.zeros(120, dtype=torch.int32)
    compile_host(source).indices(pointer(out))
    assert out.tolist() == [b * 1000 + t for b in range(3) for t in range(40)]
