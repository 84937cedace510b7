"""Which frames the switch loses and how long it holds them, without a network device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_core.network import switch as module

IP, ARP = b"\x08\x00", b"\x08\x06"


class Port:
    """A port with the frames that arrive at it."""

    def __init__(self, name: str, junction: Any) -> None:
        self.name, self.junction, self.last_due = name, junction, 0.0
        self.frames: list[bytes] = []
        self.socket = SimpleNamespace(recv=self.receive)

    def receive(self, _: int) -> bytes:
        if not self.frames:
            raise BlockingIOError
        return self.frames.pop(0)


def held(
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    frames: list[bytes],
    jitters_s: tuple[float, ...] = (),
    loss: float = 0.0,
) -> list[tuple[float, str, bytes]]:
    """Let broadcast frames arrive at time 100 and return due time, port and frame, in the order of
    sending."""
    monkeypatch.setattr(module, "_Port", Port)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    draws = iter(jitters_s)
    fake = SimpleNamespace(random=lambda: 0.0, uniform=lambda low, high: next(draws, 0.0))
    monkeypatch.setattr(module, "random", fake)
    configuration = {
        "ports": ["p0", "p1"],
        "uplink": "up",
        "delay_s": 1.0,
        "jitter_s": 0.5,
        "loss": loss,
    }
    found = module._Switch([configuration])
    port: Any = next(port for port in found._ports if port.name == source)
    port.frames = list(frames)
    found._receive(port)
    return [
        (due, target.name, frame)
        for due, _, target, frame in sorted(found._held, key=lambda each: each[:2])
    ]


def frame(kind: bytes, number: int) -> bytes:
    return bytes(10) + b"\xff" * 6 + b"\x02" * 6 + kind + bytes([number])


def test_frames_to_and_from_the_uplink_are_held_by_the_other_junction_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [(due, port) for due, port, _ in held(monkeypatch, "p0", [frame(IP, 1)])] == [
        (100.0, "up"),
        (101.0, "p1"),
    ]
    from_uplink = held(monkeypatch, "up", [frame(IP, 1)])
    assert [(due, port) for due, port, _ in from_uplink] == [(100.0, "p0"), (100.0, "p1")]


def test_loss_spares_arp_and_the_uplink(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [frame(IP, 1), frame(ARP, 2)]
    found = [(port, kept[-1]) for _, port, kept in held(monkeypatch, "p0", frames, loss=0.5)]
    assert sorted(found) == [("p1", 2), ("up", 1), ("up", 2)]


def test_frames_of_a_port_do_not_overtake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = held(monkeypatch, "p0", [frame(IP, 1), frame(IP, 2)], jitters_s=(0.5, -0.5))
    assert [(due, kept[-1]) for due, port, kept in found if port == "p1"] == [
        (101.5, 1),
        (101.5, 2),
    ]
