"""Collect the private parts of torch that the library uses.

torch may change a name that begins with an underscore in any release. So the library calls such parts through this
module only, and :data:`PARTS` lists them, each with its user, the reason, and what happens without it. The version
test looks up every part in the installed torch: with a torch that lacks one, it names the part and its user.

Some parts are names that a subclass has to override or an attribute that it has to set. They stay in the subclass, and
are listed here. The operations ``torch._foreach_...`` are listed too: the optimizers of torch are built on them, but
torch does not document them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "PARTS",
    "PRIVATE_OPTIMIZER_ATTRIBUTES",
    "Part",
    "buffers_of",
    "call_after_backward",
    "check_batch_norm_input",
    "current_backward_pass",
    "default_store",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "group_timeout_s",
    "mark_constant",
    "mpi_class",
    "optimizer_hooks",
    "pack_for_cudnn",
    "recurrent_weights",
    "set_mpi_class",
    "set_recurrent_weights",
    "storage_users",
]


@dataclass(frozen=True)
class Part:
    """A private part of torch.

    Attributes:
        name: Its name in torch.
        user: The module that uses it.
        reason: What it is used for.
        otherwise: What happens without it.
        find: Function that raises an exception if torch does not have the part; by default it looks up ``name``.
    """

    name: str
    user: str
    reason: str
    otherwise: str
    find: Callable[[], object] | None = None

    def problem(self) -> str | None:
        """Return a message if the installed torch lacks this part, else None.

        Example:
            >>> PARTS[0].problem() is None
            True
        """
        try:
            if self.find is None:
                attrgetter(self.name.removeprefix("torch."))(torch)
            else:
                self.find()
        except (AttributeError, ImportError, LookupError) as error:
            return (
                f"torch {torch.__version__} no longer has {self.name}, which {self.user} uses for {self.reason}; "
                f"without it: {self.otherwise}. torch says: {error}"
            )
        return None


# ---- autograd


def current_backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


# ---- memory and lists of tensors


def storage_users(storage: torch.UntypedStorage) -> int | None:
    """Return the number of tensors and storage objects that share some memory; None if torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in few kernels for the whole list."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def foreach_mul_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor in place by one number, in few kernels for the whole list."""
    torch._foreach_mul_(tensors, factor)  # type: ignore[call-overload]


def foreach_div_(tensors: Sequence[Tensor], divisor: float | Tensor) -> None:
    """Divide each tensor in place by one number, in few kernels for the whole list."""
    torch._foreach_div_(tensors, divisor)  # type: ignore[call-overload]


# ---- modules


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the buffers of one module, without those of its children; a change changes the module."""
    return module._buffers


def check_batch_norm_input(norm: nn.Module, input: Tensor) -> None:
    """Raise the error of torch's batch norm if ``input`` has a wrong number of dimensions."""
    norm._check_input_dim(input)  # type: ignore[operator]


def recurrent_weights(module: nn.RNNBase) -> tuple[list[str], list[Any]]:
    """Return the names and the tensors that a recurrent module gives to its kernel, brought up to date."""
    # The list may be out of date, for example after the parameters were replaced.
    module._update_flat_weights()
    return module._flat_weights_names, module._flat_weights


def set_recurrent_weights(module: nn.RNNBase, weights: list[Any]) -> None:
    """Let a recurrent module give other tensors to its kernel."""
    module._flat_weights = weights


def pack_for_cudnn(module: nn.RNNBase, weights: list[Tensor]) -> None:
    """Move the weights of a recurrent module into one new buffer, in cuDNN's order."""
    import torch.backends.cudnn.rnn as cudnn_rnn

    torch._cudnn_rnn_flatten_weight(
        weights,
        (4 if module.bias else 2) + (module.proj_size > 0),
        module.input_size,
        cudnn_rnn.get_cudnn_mode(module.mode),
        module.hidden_size,
        module.proj_size,
        module.num_layers,
        module.batch_first,
        module.bidirectional,
    )


# ---- optimizers and the compiler

PRIVATE_OPTIMIZER_ATTRIBUTES = frozenset({"_opt_called", "_zero_grad_profile_name"})
"""Attributes that torch sets on an optimizer object and that its copies must not get."""


def optimizer_hooks(optimizer: torch.optim.Optimizer, kind: str) -> Collection[Callable[..., Any]]:
    """Return the hooks of an optimizer.

    Args:
        optimizer: The optimizer.
        kind: ``"state_dict_pre"``, ``"state_dict_post"``, ``"load_state_dict_pre"`` or ``"load_state_dict_post"``.
    """
    hooks: dict[int, Callable[..., Any]] = getattr(optimizer, f"_optimizer_{kind}_hooks")
    return hooks.values()


def mark_constant(function: Callable[..., Any]) -> None:
    """Let torch.compile keep the result that a function has while it compiles."""
    # torch.compiler.assume_constant_result() sets this attribute, but imports the whole compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- process groups


def default_store() -> Any:
    """Return the store of the process group of all workers."""
    return dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]


def group_timeout_s(group: Any, device: str) -> float | None:
    """Return the time limit of a group's collectives on a kind of device; None if torch does not tell."""
    try:
        return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None


def mpi_class() -> Any:
    """Return the class that torch uses for the backend ``mpi``; None if it was built without MPI."""
    return getattr(dist.distributed_c10d, "ProcessGroupMPI", None)


def set_mpi_class(maker: Any) -> None:
    """Let torch use a class for the backend ``mpi``, as if it was built with MPI."""
    dist.distributed_c10d.ProcessGroupMPI = maker  # type: ignore[misc, assignment, attr-defined]
    dist.distributed_c10d._MPI_AVAILABLE = True  # type: ignore[attr-defined]


# ---- the table


def _named_in(owner: Any, name: str) -> None:
    """Raise a LookupError if torch's source of a class or function does not have a name."""
    if name not in inspect.getsource(owner):
        raise LookupError(f"{owner.__module__}.{owner.__qualname__} does not have it")


def _hook_table(kind: str) -> Part:
    name = f"_optimizer_{kind}_hooks"
    return Part(
        f"torch.optim.Optimizer.{name}",
        "mlbench_core.optim.pytorch",
        "calling a user's hooks around a state dict of its own",
        "a state dict of a distributed optimizer raises an AttributeError",
        lambda: _named_in(torch.optim.Optimizer, name),
    )


def _foreach(name: str) -> Part:
    return Part(
        f"torch.{name}",
        "mlbench_core.optim and mlbench_core.aggregation",
        "working on all gradients in few kernels, as torch's own optimizers do",
        "steps of these optimizers raise an AttributeError",
    )


def _overridden(owner: str, name: str, reason: str) -> Part:
    """Return a method of torch's process groups that the backend ``mpi`` overrides."""
    return Part(
        f"torch.distributed.{owner}.{name}",
        "mlbench_core.distributed.pytorch.mpi",
        reason,
        "the operation is not called, and torch says that the backend mpi does not support it",
    )


_RNN = (
    "mlbench_core.models.pytorch.layers.dropout_layers",
    "dropping recurrent weights without a copy of the module",
    "WeightDrop of an LSTM fails",
)

PARTS: tuple[Part, ...] = (
    Part(
        "torch._C._current_graph_task_id",
        "mlbench_core.aggregation.pytorch.overlap",
        "telling one backward pass from another that runs inside it",
        "overlap=True raises an AttributeError in the first backward pass",
    ),
    Part(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "mlbench_core.aggregation.pytorch.overlap",
        "sending the remaining buckets at the end of a backward pass",
        "overlap=True raises an AttributeError in the first backward pass",
    ),
    Part(
        "torch._C._storage_Use_Count",
        "mlbench_core.aggregation.pytorch.buckets",
        "reducing a gradient in place only if no other tensor shares its memory",
        "every gradient counts as shared and is copied first",
    ),
    Part(
        "torch.UntypedStorage._cdata",
        "mlbench_core.aggregation.pytorch.buckets",
        "the argument of torch._C._storage_Use_Count",
        "overlap=True raises an AttributeError",
        lambda: torch.UntypedStorage(1)._cdata,
    ),
    *(_foreach(name) for name in ("_foreach_copy_", "_foreach_mul_", "_foreach_div_")),
    Part(
        "torch.nn.Module._buffers",
        "mlbench_core.aggregation.pytorch.consensus",
        "restoring buffers, those set to None included, after a validation of the average",
        "validating the average raises an AttributeError",
        lambda: nn.Linear(1, 1)._buffers,
    ),
    Part(
        "torch.nn.BatchNorm2d._check_input_dim",
        "mlbench_core.models.pytorch.batch_norm",
        "raising torch's own error for an input of a wrong shape",
        "training with DistributedBatchNorm2d raises an AttributeError",
    ),
    Part("torch.nn.RNNBase._flat_weights", *_RNN, lambda: nn.RNN(1, 1)._flat_weights),
    Part("torch.nn.RNNBase._flat_weights_names", *_RNN, lambda: nn.RNN(1, 1)._flat_weights_names),
    Part("torch.nn.RNNBase._update_flat_weights", *_RNN),
    Part(
        "torch._cudnn_rnn_flatten_weight",
        _RNN[0],
        "packing the weights that are used for one step in the order of cuDNN",
        "WeightDrop of an LSTM fails on a GPU",
    ),
    *(_hook_table(f"{kind}_{time}") for kind in ("state_dict", "load_state_dict") for time in ("pre", "post")),
    Part(
        "torch.optim.Optimizer._opt_called",
        "mlbench_core.optim.pytorch",
        "leaving the marks of a scheduler out of copies of an optimizer",
        "copies have one attribute more or less",
        lambda: _named_in(torch.optim.lr_scheduler.LRScheduler, "_opt_called"),
    ),
    Part(
        "torch.optim.Optimizer._zero_grad_profile_name",
        "mlbench_core.optim.pytorch",
        "leaving the marks of the profiler out of copies of an optimizer",
        "copies have one attribute more or less",
        lambda: _named_in(torch.optim.Optimizer, "_zero_grad_profile_name"),
    ),
    Part(
        "torch.optim.Optimizer._step_supports_amp_scaling",
        "mlbench_core.optim.pytorch",
        "skipping a step on all workers if the gradients of one overflow (a class attribute of its optimizers)",
        "a GradScaler skips the step on the worker alone, and the workers' weights differ",
        lambda: _named_in(torch.amp.GradScaler.step, "_step_supports_amp_scaling"),
    ),
    Part(
        "torch.amp.GradScaler._unscale_grads_",
        "mlbench_core.optim.pytorch",
        "agreeing on an overflow (overridden by DistributedGradScaler)",
        "a worker skips a step alone, and the workers' weights differ",
    ),
    Part(
        "torch.optim.lr_scheduler.LRScheduler._last_lr",
        "mlbench_core.lr_scheduler.pytorch.lr",
        "get_last_lr() during the warm-up before a plateau (an attribute that the subclass sets)",
        "get_last_lr() is out of date",
        lambda: _named_in(torch.optim.lr_scheduler.LRScheduler.get_last_lr, "_last_lr"),
    ),
    Part(
        "_dynamo_marked_constant",
        "mlbench_core.ops.pytorch.extension",
        "compiling a model without a break of the graph at the question if the kernels are usable",
        "torch.compile breaks the graph there",
        lambda: _named_in(torch._dynamo.assume_constant_result, "_dynamo_marked_constant"),
    ),
    Part(
        "torch.distributed.distributed_c10d._get_default_store",
        "mlbench_core.distributed.pytorch.process_groups",
        "the records of the workers, which name the worker that was lost",
        "starting a run with several workers raises an AttributeError",
    ),
    Part(
        "torch.distributed.ProcessGroup._get_backend",
        "mlbench_core.distributed.pytorch.process_groups",
        "the time limit of a subgroup",
        "the limit of the store is used",
    ),
    Part(
        "torch.distributed.distributed_c10d._MPI_AVAILABLE",
        "mlbench_core.distributed.pytorch.mpi",
        "making mpi a backend of a torch that was built without MPI",
        'init_process_group("mpi") says that torch was built without MPI',
    ),
    Part(
        "torch.distributed.distributed_c10d.ProcessGroupMPI",
        "mlbench_core.distributed.pytorch.mpi",
        "making mpi a backend of a torch that was built without MPI",
        "torch does not create the process groups of this library",
        lambda: _named_in(dist.distributed_c10d._new_process_group_helper, "ProcessGroupMPI.create"),  # type: ignore[attr-defined]
    ),
    _overridden("ProcessGroup", "_allgather_base", "all_gather_into_tensor"),
    _overridden("ProcessGroup", "_reduce_scatter_base", "reduce_scatter_tensor"),
    _overridden("ProcessGroup", "_start_coalescing", "batch_isend_irecv and coalesced collectives"),
    _overridden("ProcessGroup", "_end_coalescing", "batch_isend_irecv and coalesced collectives"),
    _overridden("Work", "_source_rank", "the sender of a message that recv received from any rank"),
)
"""All private parts of torch in use, in the order of the packages."""
