"""The losses that an observed script passes to backward()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlbench_core.observe import losses
from mlbench_core.observe.observer import Observer
from mlbench_core.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("one_thread")


class OnDevice(Tensor):
    """A tensor on a device without 64-bit numbers, as MPS; its memory is that of the CPU."""

    place: str

    @classmethod
    def at(cls, place: str, value: Tensor) -> OnDevice:
        tensor: OnDevice = value.as_subclass(cls)
        tensor.place = place
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.double:
            raise TypeError("this device has no float64")
        tensors = args[0] if isinstance(args[0], list) else [args[0]]
        places = {tensor.place for tensor in tensors}
        if len(places) > 1:
            raise RuntimeError("tensors must be on the same device")
        (place,) = places
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device(place)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, OnDevice):
            result.place = place
        return result


def test_losses_of_two_devices_without_64_bit_numbers() -> None:
    """Also with losses of two precisions, and with those of the CPU in between."""
    wide, narrow = torch.tensor([0.1]), torch.tensor(0.3, dtype=torch.float16)
    mixed: list[float | Tensor] = [OnDevice.at("cuda:0", wide), 0.5]
    mixed += [OnDevice.at("cuda:1", wide + 1), 0.25, OnDevice.at("cuda:0", narrow)]
    expected = [wide.item(), 0.5, (wide + 1).item(), 0.25, narrow.item()]
    assert list(losses._values(mixed)) == expected


def test_losses_in_a_generator() -> None:
    weight = nn.Parameter(torch.ones(1))
    with Observer(Tracker([], "run", 0, progress=False)) as watched:
        optimizer = torch.optim.SGD([weight], lr=0.0)
        torch.autograd.backward(factor * weight for factor in (2.0, 3.0))
        optimizer.step()
    assert weight.grad is not None
    assert weight.grad.item() == 5.0
    assert watched.losses.first == 2.0


def test_backward_from_an_edge_of_the_graph() -> None:
    weight = nn.Parameter(torch.ones(1))
    loss = 2 * weight
    with Observer(Tracker([], "run", 0, progress=False)) as watched:
        optimizer = torch.optim.SGD([weight], lr=0.0)
        edge = torch.autograd.graph.get_gradient_edge(loss)
        torch.autograd.backward(edge, grad_tensors=(torch.ones(1),))
        optimizer.step()
    assert weight.grad is not None
    assert weight.grad.item() == 2.0
    assert watched.losses.first is None


def test_loss_of_a_shorter_last_step() -> None:
    """The data of an epoch ends after two of four micro-batches."""
    with Observer(Tracker([], "run", 0, progress=False)) as watched:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for count in (4, 2, 4, 1):
            for _ in range(count):
                (model(torch.full((1, 1), 6.0)).sum() / 4).backward()
            optimizer.step()
    recorded = [entry[2] for entry in watched.tracker.history if entry[1] == "train_loss"]
    assert recorded == [6.0] * 4
