"""Prepare tensors for MPI, which reads and writes one contiguous piece of memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

__all__ = ["Buffer", "is_cuda_aware"]


class Buffer:
    """A tensor's elements in contiguous memory that MPI can read and write.

    That is the tensor's own memory if it is contiguous and on the CPU, or on a GPU whose memory MPI
    can work on. Otherwise it is a copy. For a tensor on a GPU it lies in pinned host memory, unless
    MPI can work on the GPU's.

    Args:
        tensor: The tensor.
        fill: True if MPI reads it. If not, a copy starts with undefined values.
        on_host: True if it has to be in host memory, even if MPI can work on a GPU's.

    Raises:
        TypeError: The tensor is not dense, or on a device that is neither CPU nor a CUDA GPU.
    """

    def __init__(self, tensor: torch.Tensor, fill: bool = True, on_host: bool = False) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(
                f"MPI sends dense tensors, and this one's layout is {tensor.layout}: use to_dense()"
            )
        self.tensor = tensor
        stays = tensor.device.type == "cpu" or (tensor.is_cuda and not on_host and is_cuda_aware())
        # Conjugation and negation may be lazy flags on memory that has other values.
        if stays and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            self.memory = tensor
        else:
            self.memory = _copy(tensor, fill, stays)
        # MPI does not wait for CUDA streams: the values must be there before it reads them.
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    def write_back(self) -> None:
        """Copy the values that MPI has written into the tensor."""
        if self.memory is self.tensor:
            return
        with torch.no_grad():
            self.tensor.copy_(self.memory)
        # The work is done when this returns, and the caller may read the tensor on another stream.
        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()


def _copy(tensor: torch.Tensor, fill: bool, stays: bool) -> torch.Tensor:
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"MPI sends tensors of the CPU and of CUDA GPUs, and this one is on {tensor.device}"
        )
    device = torch.device("cpu")
    if stays:
        device = tensor.device
    # Copies between pinned memory and a GPU do not block the host.
    pin = tensor.is_cuda and not stays
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pin)
    if fill:
        memory.copy_(tensor.detach(), non_blocking=True)
    return memory


@functools.cache
def is_cuda_aware() -> bool:
    """Return True if the MPI library reports that it works on the memory of CUDA GPUs.

    Open MPI and MPICH report it through ``MPIX_Query_cuda_support``, which is called once.
    """
    if not torch.cuda.is_available():
        return False
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the elements of all tensors, one after the other, into new memory."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
