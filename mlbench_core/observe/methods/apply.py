"""Exchange the method by which the workers of an unchanged DDP script communicate.

A method takes the place of DDP's average of gradients at two points of a step::

    backward() -- DDP calls the hook with each bucket --+-- gradients: the aggregation's result
                                                        +-- weights, optimizer: left as they are
    optimizer.step() -- after_step() -------------------+-- weights: the aggregation acts on them

The script's optimizer stays, except for methods of ``--optimizer``. A checkpoint of the script has
no state of a method, such as error memories or DiLoCo's shared weights. A resumed run starts them
again from zero.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mlbench_core.aggregation.pytorch import (
    AVG_WORLD,
    Aggregation,
    AllReduceAggregation,
    ARCTopKAggregation,
    ChocoAggregation,
    ChunkedTopKAggregation,
    DecentralizedAggregation,
    DeMoAggregation,
    DESLOCAggregation,
    DiLoCoAggregation,
    DionAggregation,
    EagerDiLoCoAggregation,
    EF21Aggregation,
    EFSignAggregation,
    NoLoCoAggregation,
    OutlierPenalty,
    PeriodicAggregation,
    PowerAggregation,
    PushSumAggregation,
    QSGDAggregation,
    QuantizedAllReduceAggregation,
    SignAggregation,
    SparseLoCoAggregation,
    SparsifiedAggregation,
    SPARTAAggregation,
    StreamingDiLoCoAggregation,
    as_ddp_hook,
)
from mlbench_core.aggregation.pytorch.aggregation import parameters_of, refuse_complex
from mlbench_core.aggregation.pytorch.transport.topology import ring
from mlbench_core.errors import ConfigurationError
from mlbench_core.observe.methods.names import METHODS, MethodChoice
from mlbench_core.observe.methods.own_class import check_own_class
from mlbench_core.optim.pytorch import Dion, Dion2, Dion3, MuonAdamW, NorMuon, OneBitAdam
from mlbench_core.optim.pytorch.distributed import is_called_by_checkpoint_functions
from mlbench_core.optim.pytorch.local_steps.periodic import make_outer_optimizer

__all__ = ["Method", "Obstacle", "make_method", "refusal"]

Obstacle = Literal["own hook", "FSDP", "no DDP", "no optimizer", "GradScaler"]
_OBSTACLES: dict[Obstacle, str] = {
    "own hook": "without a communication hook of its own, but it calls register_comm_hook: take "
    "this call out of the script, or leave the option out",
    "FSDP": "with DistributedDataParallel, but FSDP shards this model and sends the shards itself: "
    "leave the option out, or call mlbench_core's set_fsdp_hooks in the script",
    "no DDP": "with DistributedDataParallel, but no model was wrapped before the first step of the "
    "optimizer: wrap the model, or leave the option out",
    "no optimizer": "with a torch.optim.Optimizer, because it acts after its steps: make one, or "
    "leave the option out",
    "GradScaler": "without a GradScaler, because each worker would skip other steps than the rest: "
    "train in bfloat16 or float32, or take a method that exchanges gradients",
}


def refusal(choice: MethodChoice, obstacle: Obstacle) -> ConfigurationError:
    """Return the error about a script that cannot take a method.

    Args:
        choice: The method.
        obstacle: The property of the script that is in its way. ``"GradScaler"`` is in the way of
            methods on weights only.
    """
    flag = "--method"
    if choice.kind == "optimizer":
        flag = "--optimizer"
    return ConfigurationError(f"{flag} {choice} needs a script {_OBSTACLES[obstacle]}")


class Method:
    """A way in which the workers of a script communicate.

    Attributes:
        choice: Its name and options.
    """

    def __init__(self, choice: MethodChoice) -> None:
        self.choice = choice

    def hook(self, ddp_model: DistributedDataParallel) -> tuple[Any, Any] | None:
        """Return the arguments of ``ddp_model.register_comm_hook``; None to keep DDP's average.

        Call it at the end of DDP's constructor, which has given all workers the same weights. It
        can be called for several models.

        Raises:
            ConfigurationError: An option does not fit the others, the model or the number of
                workers.
        """
        raise NotImplementedError

    def after_step(self, optimizer: Optimizer) -> None:
        """Act on the weights; call it after a step of the script's optimizer that ends an update.

        All workers call it equally often. Weights of a model without a backward pass since the last
        call stay as they are.
        """

    def new_optimizer(
        self, cls: type[Optimizer], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Optimizer:
        """Return the optimizer to use in place of ``cls(*args, **kwargs)``."""
        return cls(*args, **kwargs)


@contextlib.contextmanager
def _naming(choice: MethodChoice) -> Iterator[None]:
    """Let errors about options or the model name the method."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{choice} cannot be used here: {error}") from error


class _OnGradients(Method):
    """A method whose result takes the place of DDP's average of gradients."""

    def __init__(self, choice: MethodChoice) -> None:
        super().__init__(choice)
        # Of a class of the user, here: before the script starts.
        self._make = _ON_GRADIENTS.get(choice.name) or _own_maker(choice)

    def hook(self, ddp_model: DistributedDataParallel) -> tuple[Any, Any]:
        """See :meth:`Method.hook`."""
        group = ddp_model.process_group
        with _naming(self.choice):
            aggregation = self._make(ddp_model.module, process_group=group, **self.choice.options)
            return as_ddp_hook(aggregation, ddp_model)


def _own_maker(choice: MethodChoice) -> Callable[..., Aggregation]:
    """Import the file of a class of the user, and return a function that makes an aggregation."""
    assert choice.own_class is not None, "the other methods are in the tables below"
    check_own_class(choice, Path.cwd())
    file, name = choice.own_class
    spec = importlib.util.spec_from_file_location("mlbench_own_method", file)
    assert spec is not None and spec.loader is not None, "the name ends with .py"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigurationError(
            f"--method {choice}: {file} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    cls = getattr(module, name)
    if not (isinstance(cls, type) and issubclass(cls, Aggregation)):
        raise ConfigurationError(
            f"--method must name a class of mlbench_core.aggregation.pytorch.Aggregation, "
            f"not {name} of {file}: derive it from Aggregation"
        )
    accepted = inspect.signature(cls).parameters

    def make(model: nn.Module, process_group: Any, **options: Any) -> Aggregation:
        given = {"model": model, "process_group": process_group}
        taken = {key: value for key, value in given.items() if key in accepted}
        aggregation: Aggregation = cls(**taken, **options)
        return aggregation

    return make


class _OnWeights(Method):
    """A method that combines weights after the step."""

    def __init__(self, choice: MethodChoice) -> None:
        super().__init__(choice)
        self._count = 0
        # Models that had a backward pass since the last call of after_step, by their number. A
        # script may train one of several models, or replace a model by a new one.
        self._trained: dict[int, _Weights] = {}

    def hook(self, ddp_model: DistributedDataParallel) -> tuple[Any, Any]:
        """See :meth:`Method.hook`."""
        make, group = _ON_WEIGHTS[self.choice.name], ddp_model.process_group
        with _naming(self.choice):
            aggregation = make(process_group=group, **self.choice.options)
            refuse_complex(aggregation, dict(ddp_model.module.named_parameters()))
        # The method combines buffers with the weights. DDP would overwrite them in each forward
        # pass by those of the first worker.
        ddp_model.broadcast_buffers = False
        self._count += 1
        return _Weights(self._trained, self._count, ddp_model.module, aggregation), _pass_weights

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """See :meth:`Method.after_step`."""
        # They take a step of size 0, perhaps on one worker alone, to create the optimizer's state.
        if is_called_by_checkpoint_functions():
            return
        # All workers send in one order, that in which they made their models.
        trained = sorted(self._trained.items())
        self._trained.clear()
        for _, weights in trained:
            with _naming(self.choice):
                weights.watch(optimizer)
            weights.aggregate()


class _Weights:
    """The weights of a model and their aggregation; the state of DDP's hook.

    Args:
        trained: Receives these weights in each backward pass, under ``number``.
        number: Number of the model in the script.
        model: The model without DDP.
        aggregation: An aggregation of weights.
    """

    def __init__(
        self,
        trained: dict[int, _Weights],
        number: int,
        model: nn.Module,
        aggregation: Aggregation,
    ) -> None:
        self._trained = trained
        self._number = number
        self._model = model
        self._aggregate = aggregation.agg_model()
        self._moments: DESLOCAggregation | None = None
        if isinstance(aggregation, DESLOCAggregation):
            self._moments = aggregation
        if isinstance(aggregation, PeriodicAggregation):
            aggregation = aggregation.inside
        self._outer: DiLoCoAggregation | None = None
        if isinstance(aggregation, DiLoCoAggregation):
            self._outer = aggregation

    def begin(self) -> None:
        """Note a backward pass, and share the weights if it is the first one."""
        self._trained[self._number] = self
        # Not earlier, because a script may load a checkpoint after it wrapped the model.
        if self._outer is not None:
            self._outer.start(self._model)

    def watch(self, optimizer: Optimizer) -> None:
        """Let an aggregation of moments find those of the optimizer that has taken a step."""
        if self._moments is None:
            return
        named = parameters_of(self._model)
        held = {param for group in optimizer.param_groups for param in group["params"]}
        if any(param.requires_grad and param not in held for param in named.values()):
            raise ValueError(
                "one optimizer must have all weights that require gradients, because their moments "
                "are averaged with them: train with one, or take another method"
            )
        self._moments.watch(named, optimizer)

    def aggregate(self) -> None:
        """Replace the weights by the workers' result, if it is due."""
        self._aggregate(self._model, AVG_WORLD)


# DDP compares the annotations of a hook with types, which postponed ones are not.
def _pass_weights(weights, bucket):  # type: ignore[no-untyped-def]
    """Leave a bucket as it is, and note the backward pass."""
    weights.begin()
    return _pass_bucket(None, bucket)


def _pass_bucket(_, bucket):  # type: ignore[no-untyped-def]
    """Leave a bucket as it is."""
    memory = bucket.buffer()
    devices = None
    if memory.is_cuda:
        # With its device, the future makes the stream that waits for it wait for the gradients.
        devices = [memory.device]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(memory)
    return future


class _OfOptimizer(Method):
    """A method of an optimizer that takes the place of the script's."""

    def hook(self, ddp_model: DistributedDataParallel) -> tuple[Any, Any] | None:
        """See :meth:`Method.hook`."""
        if METHODS[self.choice.name].exchanges_steps:
            return None, _pass_bucket
        return None

    def new_optimizer(
        self, cls: type[Optimizer], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Optimizer:
        """Make the optimizer for the same parameters.

        It takes over ``lr``, ``weight_decay``, ``betas`` and ``eps`` of the call and the first two
        of its parameter groups, unless the user gave them as options.

        Raises:
            ConfigurationError: The script maximizes, no process group exists yet, or an option is
                wrong.
        """
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                f"--optimizer {self.choice} needs a script that calls init_process_group before it "
                "makes its optimizer: move the call"
            )
        bound = inspect.signature(cls).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.get("maximize"):
            raise ConfigurationError(
                f"--optimizer {self.choice} needs a script that minimizes, but it gives "
                "maximize=True: negate the loss instead"
            )
        params = next(iter(bound.arguments.values()))
        given = {name: value for name, value in self.choice.options.items() if value is not None}
        taken = {}
        for name in ("lr", "weight_decay", "betas", "eps"):
            if name in bound.arguments and name not in given:
                taken[name] = bound.arguments[name]
        with _naming(self.choice):
            return _OPTIMIZERS[self.choice.name](_groups(params, given), **taken, **given)


def _groups(params: Any, given: Mapping[str, Any]) -> list[Any]:
    """Return parameters or groups of them, without the options that the new optimizer has not."""
    kept = {"params", "lr", "weight_decay"} - given.keys()
    groups: list[Any] = []
    for item in params:
        if isinstance(item, dict):
            item = {name: value for name, value in item.items() if name in kept}
        groups.append(item)
    return groups


def make_method(choice: MethodChoice) -> Method | None:
    """Make the method of a choice; None for ``as-is``.

    Args:
        choice: The result of :func:`~mlbench_core.observe.methods.names.parse_method` or
            :func:`~mlbench_core.observe.methods.names.parse_optimizer`.
    """
    kinds: dict[str, type[Method]] = {
        "gradients": _OnGradients,
        "weights": _OnWeights,
        "optimizer": _OfOptimizer,
    }
    if choice.kind == "as-is":
        return None
    return kinds[choice.kind](choice)


# ---- the aggregation or optimizer of each name; options as in names.METHODS


def _in_dtype(dtype: torch.dtype) -> Callable[..., Aggregation]:
    return lambda model, **group: AllReduceAggregation(overlap=True, comm_dtype=dtype, **group)


def _quantized(model: Any, bits: str, **options: Any) -> Aggregation:
    return QuantizedAllReduceAggregation(bits=int(bits), **options)


_ON_GRADIENTS: dict[str, Callable[..., Aggregation]] = {
    "bf16": _in_dtype(torch.bfloat16),
    "fp16": _in_dtype(torch.float16),
    "power_sgd": lambda model, **options: PowerAggregation(model, world_size=None, **options),
    "acp_sgd": lambda model, **options: PowerAggregation(
        model, world_size=None, alternate=True, **options
    ),
    "sign_sgd": lambda model, **options: SignAggregation(**options),
    "ef_sign_sgd": lambda model, **options: EFSignAggregation(**options),
    "sparsified_sgd": SparsifiedAggregation,
    "centralized_sparsified_sgd": lambda model, **options: SparsifiedAggregation(
        model, random=True, **options
    ),
    "ef21": EF21Aggregation,
    "arc_top_k": ARCTopKAggregation,
    "qsgd": lambda model, **options: QSGDAggregation(norm=math.inf, **options),
    "quantized_sgd": _quantized,
    "loco": _quantized,
    "demo": lambda model, **options: DeMoAggregation(**options),
}


def _local_sgd(period: int, delay: int, **group: Any) -> Aggregation:
    return PeriodicAggregation(AllReduceAggregation(**group), period, delay)


def _diloco(period: int, outer_lr: float, outer_momentum: float, **group: Any) -> Aggregation:
    outer = make_outer_optimizer(outer_lr, outer_momentum)
    return PeriodicAggregation(DiLoCoAggregation(outer, **group), period)


def _edit(period: int, outer_lr: float, outer_momentum: float, **group: Any) -> Aggregation:
    outer = make_outer_optimizer(outer_lr, outer_momentum)
    penalized = DiLoCoAggregation(outer, penalty=OutlierPenalty(), **group)
    return PeriodicAggregation(penalized, period)


def _eager_diloco(period: int, outer_lr: float, outer_momentum: float, **group: Any) -> Aggregation:
    outer = make_outer_optimizer(outer_lr, outer_momentum)
    return PeriodicAggregation(EagerDiLoCoAggregation(outer, **group), period)


def _sparse_loco(period: int, outer_lr: float, **compression: Any) -> Aggregation:
    compressed = ChunkedTopKAggregation(**compression)
    return PeriodicAggregation(SparseLoCoAggregation(compressed, outer_lr=outer_lr), period)


def _no_loco(period: int, **options: Any) -> Aggregation:
    return PeriodicAggregation(NoLoCoAggregation(**options), period)


def _decentralized_sgd(process_group: Any) -> Aggregation:
    topology = ring(dist.get_world_size(process_group))
    return DecentralizedAggregation(topology=topology, process_group=process_group)


def _choco_sgd(process_group: Any, **options: Any) -> Aggregation:
    topology = ring(dist.get_world_size(process_group))
    return ChocoAggregation(topology=topology, process_group=process_group, **options)


_ON_WEIGHTS: dict[str, Callable[..., Aggregation]] = {
    "local_sgd": _local_sgd,
    "diloco": _diloco,
    "edit": _edit,
    "eager_diloco": _eager_diloco,
    "des_loc": DESLOCAggregation,
    "streaming_diloco": StreamingDiLoCoAggregation,
    "sparse_loco": _sparse_loco,
    "no_loco": _no_loco,
    "sparta": SPARTAAggregation,
    "decentralized_sgd": _decentralized_sgd,
    "choco_sgd": _choco_sgd,
    "sgp": PushSumAggregation,
}


def _dion(params: Any, rank: int, momentum: float, **options: Any) -> Optimizer:
    return Dion(params, aggregation=DionAggregation(rank=rank, momentum=momentum), **options)


_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "muon": partial(MuonAdamW, kernels=True),
    "normuon": partial(NorMuon, kernels=True),
    "dion2": partial(Dion2, kernels=True),
    "dion3": partial(Dion3, kernels=True),
    "dion": _dion,
    "one_bit_adam": OneBitAdam,
}
