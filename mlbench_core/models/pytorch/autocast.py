"""Compute a network, or its LSTMs, in another precision than that of its weights."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["AutocastLSTM", "Float32Output", "has_fast_bfloat16"]

_log = logging.getLogger(__name__)


def has_fast_bfloat16(gpu: bool) -> bool:
    """Return True if a GPU, or this CPU, has instructions for products of bfloat16 matrices.

    Args:
        gpu: True for the current GPU. Versions of torch that cannot list the instructions of a CPU
            count as a CPU without them.
    """
    if gpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    instructions: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    # x86 has the first two names, Arm the last.
    return any(instructions.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class Float32Output(nn.Module):
    """A network with outputs in float32 for the loss, independent of the type in which it computes.

    Args:
        network: The network.
        autocast: The dtype for :func:`torch.autocast`; None for none.

    Example:
        >>> network = Float32Output(nn.Linear(2, 1), autocast=torch.bfloat16)
        >>> network(torch.ones(4, 2)).dtype
        torch.float32
    """

    def __init__(self, network: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        self.autocast = autocast

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs of the network for a batch.

        Args:
            images: The batch, as the network takes it.

        Returns:
            The outputs as float32.
        """
        if self.autocast is None:
            return self.network(images).float()
        with torch.autocast(images.device.type, dtype=self.autocast):
            return self.network(images).float()


class AutocastLSTM(nn.LSTM):
    """An LSTM that :func:`torch.autocast` can run on every CPU.

    Within autocast, torch hands the LSTM to oneDNN in the dtype of autocast. oneDNN raises an error
    if the processor lacks the instructions for it: it has no LSTM in bfloat16 without AVX-512. This
    class then computes in float32, and logs that once. Its outputs and its state are float32 in
    this case. Without autocast, on a GPU, and on a CPU with the instructions, it is
    :class:`torch.nn.LSTM`, with the same arguments.

    Example:
        >>> lstm = AutocastLSTM(3, 4)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     output, (hidden, cell) = lstm(torch.ones(5, 2, 3))
        >>> output.shape, hidden.shape
        (torch.Size([5, 2, 4]), torch.Size([1, 2, 4]))
    """

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        """Return the outputs and the new state, as :meth:`torch.nn.LSTM.forward` does.

        Args:
            input: A tensor or a packed sequence, as torch.nn.LSTM takes it.
            hx: The state before the first step; None for zeros.
        """
        if not self._needs_float32(input):
            return super().forward(input, hx)
        if hx is not None:
            hx = (hx[0].float(), hx[1].float())
        with torch.autocast("cpu", enabled=False):
            # A packed sequence has float(), too.
            return super().forward(input.float(), hx)

    def _needs_float32(self, input: Tensor | PackedSequence) -> bool:
        if not torch.is_autocast_enabled("cpu"):
            return False
        if isinstance(input, PackedSequence):
            data = input.data
        else:
            data = input
        # torch computes LSTMs with weights of another dtype without oneDNN.
        if data.device.type != "cpu" or self.weight_ih_l0.dtype != torch.float32:
            return False
        dtype = torch.get_autocast_dtype("cpu")
        return not _autocast_has_lstm(dtype, self.training, torch.is_grad_enabled())


@functools.cache
def _autocast_has_lstm(dtype: torch.dtype, training: bool, with_gradients: bool) -> bool:
    """Try a tiny LSTM, because torch has no function that returns which ones oneDNN supports."""
    # Weights that are drawn on the CPU would change the random numbers of the run. Their values do
    # not matter here.
    lstm = nn.LSTM(1, 1, device="meta").to_empty(device="cpu").train(training)
    try:
        with torch.autocast("cpu", dtype), torch.set_grad_enabled(with_gradients):
            lstm(torch.zeros(1, 1, 1))
    except RuntimeError as error:
        _log_once(dtype, str(error).split(".")[0])
        return False
    return True


@functools.cache
def _log_once(dtype: torch.dtype, reason: str) -> None:
    # The cache lets each message through once.
    _log.warning(
        "LSTMs are computed in float32, not in %s, which this processor does not support: %s",
        str(dtype).removeprefix("torch."),
        reason,
    )
