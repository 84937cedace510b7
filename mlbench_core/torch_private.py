"""Collect the private parts of torch that the library uses.

torch may change a name that begins with an underscore in any release. So the library calls such
parts through the functions of this module, and :data:`PARTS` lists them, each with its user and the
reason. The version test looks up every part in the installed torch. If torch lacks one, the test
names the part and its user.

Some parts are methods that a subclass overrides or attributes that it sets. They stay in the
subclass and are only listed here. The operations ``torch._foreach_...`` are included too: torch's
own optimizers are built on them, but torch does not document them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Names in torch that one module uses for one reason.

    Attributes:
        user: The module or package, below ``mlbench_core``.
        reason: The purpose of the use.
        names: The names, below ``torch``.
        file: The file of torch whose text has the names, for attributes that only objects have.
            None for names that can be looked up.
    """

    user: str
    reason: str
    names: tuple[str, ...]
    file: str | None = None

    def problem(self) -> str | None:
        """Return a message with the parts that the installed torch lacks; None if it has all.

        Example:
            >>> PARTS[0].problem() is None
            True
        """
        missing = ", ".join(name for name in self.names if not self._has(name))
        if not missing:
            return None
        if self.file is not None:
            missing += f" in torch/{self.file}"
        return (
            f"torch {torch.__version__} no longer has {missing}, which "
            f"mlbench_core.{self.user} uses for {self.reason}"
        )

    def _has(self, name: str) -> bool:
        try:
            if self.file is None:
                attrgetter(name)(torch)
                return True
            # A look-up would need an object of each class, and an import of the compiler, which
            # takes seconds.
            text = (Path(torch.__file__).parent / self.file).read_text(encoding="utf-8")
            return re.search(rf"\b{re.escape(name)}\b", text) is not None
        except (AttributeError, OSError):
            return False


# ---- autograd


def current_backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def divisor(loss: Tensor) -> float:
    """Return the number by which a script divided its loss; 1 if it did not."""
    node = loss.grad_fn
    # node.name() takes longer, and this runs in each micro-batch.
    name = type(node).__name__
    if name not in ("DivBackward0", "MulBackward0"):
        return 1.0
    other = getattr(node, "_saved_other", None)
    # A number of the script is on the CPU, so reading it waits for no device.
    if not isinstance(other, Tensor) or other.device.type != "cpu" or other.numel() != 1:
        return 1.0
    number = float(other)
    if name == "DivBackward0":
        return number
    return 1 / number if number else 1.0


# ---- DistributedDataParallel


def time_ddp(model: nn.parallel.DistributedDataParallel, each: bool = True) -> bool:
    """Let DDP take the times of each backward pass, or of none but the first ones.

    Returns:
        False if this torch cannot.
    """
    start = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
    if start is None or model.logger is None or not hasattr(model, "_get_ddp_logging_data"):
        return False
    # It is the number of passes between two that are timed.
    start(1 if each else 1 << 30)
    return True


def ddp_times(model: nn.parallel.DistributedDataParallel) -> Mapping[str, Any]:
    """Return the times in nanoseconds of the last backward pass, and the sizes of the buckets."""
    # It has one since time_ddp().
    assert model.logger is not None
    model.logger.set_runtime_stats_and_log()
    data: Mapping[str, Any] = model._get_ddp_logging_data()
    return data


# ---- memory and lists of tensors


def storage_users(storage: torch.UntypedStorage) -> int | None:
    """Return the number of tensors and storages that share some memory; None if unknown."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    return int(count(storage._cdata))


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in few kernels for the whole list."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def foreach_mul_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor in place by one number, in few kernels for the whole list."""
    torch._foreach_mul_(tensors, factor)  # type: ignore[call-overload]


def foreach_div_(tensors: Sequence[Tensor], divisor: float | Tensor) -> None:
    """Divide each tensor in place by one number, in few kernels for the whole list."""
    torch._foreach_div_(tensors, divisor)  # type: ignore[call-overload]


def sparse_bytes(tensor: Tensor) -> int:
    """Return the bytes of the values and the indices of a sparse tensor."""
    return tensor._values().nbytes + tensor._indices().nbytes


def version(tensor: Tensor) -> int:
    """Return a number that every change of a tensor in place increases."""
    return tensor._version


# ---- modules


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the buffers of one module, without those of its children.

    Changes of the mapping change the module.
    """
    return module._buffers


def check_batch_norm_input(norm: nn.Module, input: Tensor) -> None:
    """Raise the error of torch's batch norm if ``input`` has a wrong number of dimensions."""
    norm._check_input_dim(input)  # type: ignore[operator]


def recurrent_weights(module: nn.RNNBase) -> tuple[list[str], list[Any]]:
    """Return the names and the current tensors that a recurrent module passes to its kernel."""
    # The list may be out of date, for example after the parameters were replaced.
    module._update_flat_weights()
    return module._flat_weights_names, module._flat_weights


def set_recurrent_weights(module: nn.RNNBase, weights: list[Any]) -> None:
    """Let a recurrent module pass other tensors to its kernel."""
    module._flat_weights = weights


def pack_for_cudnn(module: nn.RNNBase, weights: list[Tensor]) -> None:
    """Move the weights of a recurrent module into one new buffer, in cuDNN's order."""
    import torch.backends.cudnn.rnn as cudnn_rnn

    # Number of tensors per layer and direction: two matrices, with bias two vectors, and perhaps a
    # projection.
    tensors_per_layer = 2
    if module.bias:
        tensors_per_layer += 2
    if module.proj_size > 0:
        tensors_per_layer += 1
    torch._cudnn_rnn_flatten_weight(
        weights,
        tensors_per_layer,
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
        kind: ``"state_dict_pre"``, ``"state_dict_post"``, ``"load_state_dict_pre"`` or
            ``"load_state_dict_post"``.
    """
    hooks: dict[int, Callable[..., Any]] = getattr(optimizer, f"_optimizer_{kind}_hooks")
    return hooks.values()


def mark_constant(function: Callable[..., Any]) -> None:
    """Let torch.compile call a function once, and use its result as a constant."""
    # torch.compiler.assume_constant_result() sets this attribute, but imports the whole compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- process groups


def default_store() -> Any:
    """Return the store of the process group of all workers."""
    return dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]


def group_timeout_s(group: Any, device: str) -> float | None:
    """Return the time limit of a group's collectives on a kind of device; None without a limit."""
    try:
        return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None


def mpi_class() -> Any:
    """Return the class that torch uses for the backend ``mpi``; None if built without MPI."""
    return getattr(dist.distributed_c10d, "ProcessGroupMPI", None)


def set_mpi_class(maker: Any) -> None:
    """Let torch use a class for the backend ``mpi``, as if torch was built with MPI."""
    dist.distributed_c10d.ProcessGroupMPI = maker  # type: ignore[misc, assignment, attr-defined]
    dist.distributed_c10d._MPI_AVAILABLE = True  # type: ignore[attr-defined]


# ---- the table

PARTS = (
    Part(
        "aggregation.pytorch.transport.overlap",
        "distinguishing a backward pass from another that runs inside it, and acting at its end",
        ("_C._current_graph_task_id", "autograd.Variable._execution_engine.queue_callback"),
    ),
    Part(
        "observe",
        "the loss of a micro-batch before a script divides it by their number",
        (
            "_C._functions.DivBackward0._saved_other",
            "_C._functions.MulBackward0._saved_other",
        ),
    ),
    Part(
        "observe",
        "the times that DistributedDataParallel takes of its own communication",
        (
            "nn.parallel.DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
            "nn.parallel.DistributedDataParallel._get_ddp_logging_data",
        ),
    ),
    Part("observe", "the bytes of a sparse gradient", ("Tensor._values", "Tensor._indices")),
    Part(
        "aggregation.pytorch.transport.buckets",
        "reducing a gradient in place only if no other tensor shares its memory",
        ("_C._storage_Use_Count", "UntypedStorage._cdata"),
    ),
    Part(
        "aggregation.pytorch and mlbench_core.optim.pytorch",
        "working on all gradients in few kernels, as torch's own optimizers do",
        ("_foreach_copy_", "_foreach_mul_", "_foreach_div_"),
    ),
    Part(
        "aggregation.pytorch.consensus",
        "restoring buffers, those set to None included, after a validation of the average",
        ("_buffers",),
        "nn/modules/module.py",
    ),
    Part(
        "optim.pytorch.distributed",
        "noticing a backward pass between the clipping of gradients and the step",
        ("Tensor._version",),
    ),
    Part(
        "optim.pytorch",
        "refusing the step by which torch creates an optimizer's state before saving or loading it",
        ("_init_optim_state",),
        "distributed/checkpoint/state_dict.py",
    ),
    Part(
        "models.pytorch.batch_norm",
        "raising torch's own error for an input of a wrong shape",
        ("nn.BatchNorm2d._check_input_dim",),
    ),
    Part(
        "models.pytorch.layers.dropout_layers",
        "bringing the list of recurrent weights up to date, and packing them in cuDNN's order",
        ("nn.RNNBase._update_flat_weights", "_cudnn_rnn_flatten_weight"),
    ),
    Part(
        "models.pytorch.layers.dropout_layers",
        "dropping recurrent weights without a copy of the module",
        ("_flat_weights", "_flat_weights_names"),
        "nn/modules/rnn.py",
    ),
    Part(
        "optim.pytorch",
        "calling a user's hooks around the state dict of a distributed optimizer",
        (
            "_optimizer_state_dict_pre_hooks",
            "_optimizer_state_dict_post_hooks",
            "_optimizer_load_state_dict_pre_hooks",
            "_optimizer_load_state_dict_post_hooks",
        ),
        "optim/optimizer.py",
    ),
    Part(
        "optim.pytorch",
        "leaving the mark of the profiler out of copies of an optimizer",
        ("_zero_grad_profile_name",),
        "optim/optimizer.py",
    ),
    Part(
        "optim.pytorch",
        "leaving the mark of a scheduler out of copies of an optimizer",
        ("_opt_called",),
        "optim/lr_scheduler.py",
    ),
    Part(
        "optim.pytorch",
        "skipping a step on all workers if the gradients of one overflow",
        ("_step_supports_amp_scaling",),
        "amp/grad_scaler.py",
    ),
    Part(
        "optim.pytorch",
        "agreeing with the other workers on an overflow, in a subclass of GradScaler",
        ("amp.GradScaler._unscale_grads_",),
    ),
    Part(
        "lr_scheduler.pytorch.lr",
        "get_last_lr() during the warm-up before a plateau",
        ("_last_lr",),
        "optim/lr_scheduler.py",
    ),
    Part(
        "distributed.pytorch.process_groups",
        "the records of the workers, which name a lost worker, and the time limit of a subgroup",
        (
            "distributed.distributed_c10d._get_default_store",
            "distributed.ProcessGroup._get_backend",
        ),
    ),
    Part(
        "distributed.pytorch.mpi",
        "making mpi a backend of a torch that was built without MPI",
        ("_MPI_AVAILABLE", "ProcessGroupMPI.create"),
        "distributed/distributed_c10d.py",
    ),
    Part(
        "distributed.pytorch.mpi",
        "collectives on one tensor, blocks of operations, and the sender of a message",
        (
            "distributed.ProcessGroup._allgather_base",
            "distributed.ProcessGroup._reduce_scatter_base",
            "distributed.ProcessGroup._start_coalescing",
            "distributed.ProcessGroup._end_coalescing",
            "distributed.Work._source_rank",
        ),
    ),
)
"""All private parts of torch in use, in the order of the packages."""
