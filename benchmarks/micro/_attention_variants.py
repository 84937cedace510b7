"""The variants of attention that `attention.py` compares: ours, and four kinds of others.

(a) the calls of ``nn.MultiheadAttention``; (b) ``scaled_dot_product_attention`` with a padding
mask, by each of its backends; (c) FlashAttention on sentences of different lengths without padding;
(d) the plain reference.

A variant of the core gets Q, K and V of shape (sentences, length, heads, features). A variant of
the module gets the input, of shape (sentences, length, width), and the weights of both projections.
Each converts them to its fastest layout before the time is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _attention_batch import HEAD_DIM, HEADS, WIDTH, Batch, Layout
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlbench_core.models.pytorch.transformer.modules import MultiheadAttention
from mlbench_core.models.pytorch.transformer.modules.attention import (
    attention_mask,
    reference_attention,
)
from mlbench_core.ops.pytorch.attention import fused_attention

OURS = "ours"
SDPA_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
Attend = Callable[[Batch, Sequence[Tensor], float], Callable[[], Tensor]]
"""Takes a batch, leaves in the variant's layout and the probability of dropout; returns the forward
pass."""
Core = Callable[[Batch, torch.dtype, float], Callable[[Tensor, Tensor, Tensor], Tensor]]
"""Takes a batch, the dtype and the probability of dropout; returns a function of Q, K and V."""


class Prepared(NamedTuple):
    """A forward pass that is ready to run.

    Attributes:
        run: Returns the output in the variant's layout.
        leaves: The tensors whose gradients are computed.
    """

    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True)
class Variant:
    """One variant of attention.

    Attributes:
        part: ``"core"`` or ``"module"``.
        title: For tables.
        layout: Of its tensors.
        attend: Makes the forward pass.
        around: Makes the context in which it runs.
    """

    part: str
    title: str
    layout: Layout
    attend: Attend
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def prepare(self, batch: Batch, leaves: Sequence[Tensor], p: float) -> Prepared:
        """Convert batch-first operands to the variant's layout, and make the forward pass."""
        own = tuple(
            (batch.put(leaf, self.layout) if self._is_operand(number) else leaf)
            .detach()
            .clone()
            .requires_grad_()
            for number, leaf in enumerate(leaves)
        )
        return Prepared(self.attend(batch, own, p), own)

    def batch_first(
        self, batch: Batch, output: Tensor, gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the output and the gradients of all leaves as (sentences, length, ...), with zeros
        at padding."""
        found = [
            batch.take(gradient, self.layout) if self._is_operand(number) else gradient
            for number, gradient in enumerate(gradients)
        ]
        return [batch.take(output.detach(), self.layout), *found]

    def _is_operand(self, number: int) -> bool:
        """Return True for a leaf with data of each token; the module's second and third are
        weights."""
        return self.part == "core" or number == 0


def core_variants() -> list[Variant]:
    """Return the variants of attention between the projections, ours first."""
    sdpa = partial(_core, _sdpa)
    return [
        Variant("core", OURS, "batch first", partial(_core, _ours)),
        Variant(
            "core",
            "(a) products and softmax of nn.MultiheadAttention",
            "time first",
            partial(_core, _multihead),
        ),
        *(
            Variant(
                "core",
                f"(b) scaled_dot_product_attention, {name}",
                "batch first",
                sdpa,
                _forced(backend),
            )
            for name, backend in SDPA_BACKENDS.items()
        ),
        Variant("core", "(c) FlashAttention, variable lengths", "packed", partial(_core, _flash)),
        Variant("core", "(c) torch's varlen_attn", "packed", partial(_core, _varlen)),
        Variant("core", "(c) nested tensors", "packed", partial(_core, _nested)),
        Variant("core", "(d) plain reference", "batch first", partial(_core, _reference)),
    ]


def module_variants() -> list[Variant]:
    """Return the variants of self-attention with its projections, without biases, ours first."""
    sdpa = partial(_our_module, "sdpa")
    return [
        Variant("module", OURS, "time first", partial(_our_module, "kernel")),
        Variant("module", "(a) nn.MultiheadAttention", "time first", partial(_torch_module, True)),
        Variant(
            "module",
            "(a) nn.MultiheadAttention, need_weights=False",
            "time first",
            partial(_torch_module, False),
        ),
        *(
            Variant(
                "module",
                f"(b) scaled_dot_product_attention, {name}",
                "time first",
                sdpa,
                _forced(backend),
            )
            for name, backend in SDPA_BACKENDS.items()
        ),
        Variant(
            "module",
            "(c) FlashAttention, variable lengths",
            "packed",
            partial(_packed_module, _flash),
        ),
        Variant("module", "(c) nested tensors", "packed", partial(_packed_module, _nested)),
        Variant("module", "(d) plain reference", "time first", partial(_our_module, "reference")),
    ]


def _forced(backend: SDPBackend) -> Callable[[], AbstractContextManager[object]]:
    return partial(sdpa_kernel, backend)


def _core(core: Core, batch: Batch, leaves: Sequence[Tensor], p: float) -> Callable[[], Tensor]:
    q, k, v = leaves
    attend = core(batch, q.dtype, p)
    return lambda: attend(q, k, v)


def _ours(batch: Batch, dtype: torch.dtype, p: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return partial(fused_attention, key_padding=batch.padding, dropout_p=p)


def _multihead(
    batch: Batch, dtype: torch.dtype, p: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make the calls of ``nn.MultiheadAttention`` with weights, its default: half precision, and a
    mask to add."""
    mask: Tensor | None = None
    if batch.padding is not None:
        zeros = torch.zeros(batch.padding.shape, dtype=dtype, device=batch.padding.device)
        mask = (
            zeros.masked_fill(batch.padding, float("-inf"))
            .repeat_interleave(HEADS, dim=0)
            .unsqueeze(1)
        )

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (x.flatten(1, 2).transpose(0, 1) for x in tensors)
        q, k = q * math.sqrt(1 / HEAD_DIM), k.transpose(1, 2)
        scores = torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)
        weights = F.dropout(scores.softmax(dim=-1), p, training=p > 0)
        return torch.bmm(weights, v).transpose(0, 1).unflatten(1, (-1, HEADS))

    return attend


def _sdpa(batch: Batch, dtype: torch.dtype, p: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    seen = None if batch.padding is None else ~batch.padding[:, None, None, :]

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p).transpose(1, 2)

    return attend


def _flash(
    batch: Batch, dtype: torch.dtype, p: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Call the operator below torch's ``varlen_attn``, because that has no argument for dropout."""
    starts, most = batch.starts, batch.length

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, most, most, p, False, False
        )[0]
        return output

    return attend


def _varlen(
    batch: Batch, dtype: torch.dtype, p: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise RuntimeError("this torch has no torch.nn.attention.varlen") from error
    if p:
        raise RuntimeError("varlen_attn has no dropout")
    starts, most = batch.starts, batch.length
    return lambda q, k, v: varlen_attn(q, k, v, starts, starts, most, most)


def _nested(
    batch: Batch, dtype: torch.dtype, p: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Use nested tensors. They must be contiguous, and slices of a fused projection are not."""
    starts = batch.starts.long()
    nested = partial(
        torch.nested.nested_tensor_from_jagged,
        offsets=starts,
        min_seqlen=batch.shortest,
        max_seqlen=batch.length,
    )

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (nested(x.contiguous()).transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).values()

    return attend


def _reference(
    batch: Batch, dtype: torch.dtype, p: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    mask = attention_mask(batch.length, batch.length, batch.padding, False, batch.lengths.device)

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return reference_attention(q, k, v, mask, p)[0].transpose(1, 2)

    return attend


def _our_module(
    backend: str, batch: Batch, leaves: Sequence[Tensor], p: float
) -> Callable[[], Tensor]:
    """Make the library's module with one of its backends."""
    x, in_weight, out_weight = leaves
    module = MultiheadAttention(WIDTH, HEADS, dropout=p, backend=backend)
    _set_weights(module, in_weight, out_weight)
    return lambda: module(x, x, x, key_padding_mask=batch.padding, need_weights=False)[0]


def _torch_module(
    need_weights: bool, batch: Batch, leaves: Sequence[Tensor], p: float
) -> Callable[[], Tensor]:
    """Make torch's module, which has another path if weights are requested, as they are by
    default."""
    x, in_weight, out_weight = leaves
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=p, bias=False)
    _set_weights(module, in_weight, out_weight)
    return lambda: module(x, x, x, key_padding_mask=batch.padding, need_weights=need_weights)[0]


def _set_weights(module: nn.Module, in_weight: Tensor, out_weight: Tensor) -> None:
    """Let a module compute with these tensors instead of its parameters, to compute their
    gradients."""
    for owner, name, weight in (
        (module, "in_proj_weight", in_weight),
        (module.out_proj, "weight", out_weight),
    ):
        delattr(owner, name)
        setattr(owner, name, weight)


def _packed_module(
    core: Core, batch: Batch, leaves: Sequence[Tensor], p: float
) -> Callable[[], Tensor]:
    """Put projections around a core that takes packed rows."""
    x, in_weight, out_weight = leaves
    attend = core(batch, x.dtype, p)

    def run() -> Tensor:
        q, k, v = F.linear(x, in_weight).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
        return F.linear(attend(q, k, v).flatten(1), out_weight)

    return run
