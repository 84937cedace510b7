"""A torch optimizer that wraps another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from mlbench_core import torch_private

__all__ = ["OptimizerWrapper", "shared_optimizer_state", "state_without_hooks"]


class _NoOptimizerYet(Optimizer):
    """A placeholder that holds the parameters until a real optimizer is set."""

    _MESSAGE = "there is no torch optimizer yet: give optimizer=..., or set the attribute .optimizer"

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        raise RuntimeError(self._MESSAGE)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1] = _GroupWithoutOptions(self.param_groups[-1])


class _GroupWithoutOptions(dict[str, Any]):
    """A parameter group without a learning rate, which raises an error if a scheduler reads it."""

    def __missing__(self, option: str) -> Any:
        raise RuntimeError(f"a parameter group has no {option!r}: {_NoOptimizerYet._MESSAGE}")


class OptimizerWrapper(Optimizer):
    """A :class:`torch.optim.Optimizer` whose groups, state and defaults are those of the wrapped optimizer.

    Everything that works on a torch optimizer works on this one: learning-rate schedulers, hooks, ``add_param_group``,
    ``state_dict``, ``deepcopy`` and pickling. The groups and the state are the wrapped optimizer's objects,
    so a change through either is seen by both, also after ``load_state_dict`` and after the wrapped optimizer was
    swapped. A subclass adds ``step``.

    As in torch, hooks stay with the object they were registered on: copies and pickles have none.

    Attributes:
        own_state: Keys of ``state_dict()`` whose values differ between workers although all workers have the same
            weights. A checkpoint holds these of every worker.

    Args:
        params: Parameters to hold until :attr:`optimizer` is set.
    """

    own_state: ClassVar[tuple[str, ...]] = ()
    _inner: Optimizer

    def __init__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        self._inner = _NoOptimizerYet(params)
        super().__init__(params, {})

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the wrapped torch optimizer; None before one was set. Setting it swaps it.

        Schedulers that were built on this object continue with the new optimizer's groups if it has the same number.
        """
        return None if isinstance(self._inner, _NoOptimizerYet) else self._inner

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        # A wrapper within itself would call its own methods without end.
        inside: Optimizer = optimizer
        while isinstance(inside, OptimizerWrapper):
            if inside is self:
                raise ValueError("an optimizer cannot be put inside itself")
            inside = inside._inner
        self.check_inside(optimizer)
        self._inner = optimizer

    def check_inside(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if an optimizer cannot be wrapped; a subclass may refuse some."""

    # mypy expects plain attributes as in Optimizer; here they are those of the wrapped optimizer.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the parameter groups of the wrapped optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """Return the state of the wrapped optimizer, by parameter."""
        return self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the defaults of the wrapped optimizer."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; options it does not name get that optimizer's defaults."""
        self._inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all optimized parameters.

        Args:
            set_to_none: Set them to None instead of zero.
        """
        self._inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, in torch's format, and the entries of :meth:`extra_state`.

        As in torch, its tensors are the optimizer's own: they change with the next step. Copy it with
        :func:`copy.deepcopy` if both this optimizer and the one that loads it continue in one process.
        """
        for pre_hook in torch_private.optimizer_hooks(self, "state_dict_pre"):
            pre_hook(self)
        state_dict = {**self._inner.state_dict(), **self.extra_state()}
        for post_hook in torch_private.optimizer_hooks(self, "state_dict_post"):
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the result of :meth:`state_dict`. A plain torch optimizer's state fits as well.

        Args:
            state_dict: The state of an optimizer with the same groups.
        """
        state_dict = dict(state_dict)
        for pre_hook in torch_private.optimizer_hooks(self, "load_state_dict_pre"):
            state_dict = pre_hook(self, state_dict) or state_dict
        extra = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
        # The extra state goes first, so that a refused one leaves the wrapped optimizer as it was.
        self.load_extra_state(extra)
        self._inner.load_state_dict({key: value for key, value in state_dict.items() if key not in extra})
        for post_hook in torch_private.optimizer_hooks(self, "load_state_dict_post"):
            post_hook(self)

    def shared_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries of one worker alone; see :func:`shared_optimizer_state`."""
        return shared_optimizer_state(self, state_dict)

    def extra_state(self) -> dict[str, Any]:
        """Return the entries of :meth:`state_dict` beyond the wrapped optimizer's; a subclass may add some."""
        return {}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restore the result of :meth:`extra_state`; an empty dictionary if a state has no such entries."""

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but hooks and a ``step`` that a scheduler patched, which belong to this object."""
        return state_without_hooks(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})


def shared_optimizer_state(optimizer: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without the entries of one worker alone.

    A worker without a state of its own, or in a run with another number of workers, loads this. An error memory of
    another worker would be applied twice.

    Args:
        optimizer: The optimizer, with its aggregation if it has one.
        state_dict: Its state, saved by any worker.

    Returns:
        The state as given, without error memories and the like; see
        :meth:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation.shared_state`.
    """
    if "aggregation" not in state_dict:
        return dict(state_dict)
    return {**state_dict, "aggregation": optimizer.aggregation.shared_state(state_dict["aggregation"])}


def state_without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that its copies and pickles get, for ``__getstate__``."""
    own = {"step", *torch_private.PRIVATE_OPTIMIZER_ATTRIBUTES}
    return {k: v for k, v in optimizer.__dict__.items() if k not in own and not k.endswith("_hooks")}
