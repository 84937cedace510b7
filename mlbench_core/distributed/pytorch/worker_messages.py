"""Send messages between workers that are a process group of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.process_groups import get_backend_tensor
from mlbench_core.distributed.worker_messages import Workers

__all__ = ["ProcessGroupWorkers"]

_CHUNK_BYTES = 16 << 20


class ProcessGroupWorkers(Workers):
    """The messages of the process group of all workers."""

    @property
    def size(self) -> int:
        return process_groups.world_size()

    def sum(self, numbers: Sequence[int]) -> list[int]:
        total = get_backend_tensor(torch.tensor(numbers, dtype=torch.int64))
        dist.all_reduce(total)
        return list(map(int, total.tolist()))

    def broadcast(self, content: bytes, sender: int) -> bytes:
        is_sender = process_groups.rank() == sender
        # The others do not know the size. Their part of the sum is 0.
        own_size = 0
        if is_sender:
            own_size = len(content)
        (size,) = self.sum([own_size])
        received = bytearray()
        # Broadcast and not send, because every backend has it.
        for start in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - start)
            chunk = torch.zeros(length, dtype=torch.uint8)
            if is_sender:
                chunk = torch.frombuffer(
                    bytearray(content[start : start + length]), dtype=torch.uint8
                )
            chunk = get_backend_tensor(chunk)
            dist.broadcast(chunk, src=sender)
            received += chunk.cpu().numpy().tobytes()
        return bytes(received)
