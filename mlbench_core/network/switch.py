"""A switch in user space, which holds each frame for a time: ``python switch.py CONFIGURATION``.

It runs in the namespace of the ports and imports only the standard library, so it starts quickly.
CONFIGURATION is a list of junctions as JSON::

    {"ports": ["p0", "p1"], "uplink": "", "delay_s": 0.01, "jitter_s": 0.001, "loss": 0.001}

A frame takes this way::

    port -> lost with the probability loss
         -> held for a uniform random time from delay_s - jitter_s to delay_s + jitter_s
         -> sent to the port of its destination, which limits the bandwidth, or drops it if its
            queue is full

Frames of one port stay in order. Frames to and from the uplink are neither lost nor held: their way
goes on at another junction, which holds them.

The sockets pass on frames as the kernel has them before it cuts them into packets, of up to 64 KiB.
So one frame of Python's time carries up to 45 packets. The process ends when standard input ends,
that is, with its owner.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import random
import select
import socket
import sys
import time
from typing import Any

# Values of linux/if_packet.h and asm-generic/socket.h, which Python's module socket lacks.
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_ETH_P_ALL = 3
_ETH_P_ARP = b"\x08\x06"
_BUFFER_BYTES = 64 * 2**20
# Before each frame, the kernel puts a struct virtio_net_hdr with the work that it has put off:
# checksum and segments.
_HEADER_BYTES = 10
_FRAME_BYTES = _HEADER_BYTES + 14 + 65_536
# Other ports and due frames wait at most for this number of frames.
_BATCH = 64


class _Port:
    """A network device, to which the switch is the only other end."""

    def __init__(self, name: str, junction: _Junction) -> None:
        self.junction = junction
        self.last_due = 0.0
        # With protocol 0 it receives nothing until bind(), which names the device. Otherwise frames
        # of other devices would come first.
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        # Without this, each frame that the switch sends would come back to it.
        self.socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        for force, plain in (
            (_SO_RCVBUFFORCE, socket.SO_RCVBUF),
            (_SO_SNDBUFFORCE, socket.SO_SNDBUF),
        ):
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, force, _BUFFER_BYTES)
            except PermissionError:
                # In a user namespace, the system's limit holds.
                self.socket.setsockopt(socket.SOL_SOCKET, plain, _BUFFER_BYTES)
        self.socket.setblocking(False)
        self.socket.bind((name, _ETH_P_ALL))

    def fileno(self) -> int:
        """Return the file descriptor, for select."""
        return self.socket.fileno()


class _Junction:
    """Ports among which frames are forwarded."""

    def __init__(
        self, ports: list[str], uplink: str, delay_s: float, jitter_s: float, loss: float
    ) -> None:
        self.ports = [_Port(name, self) for name in ports]
        self.uplink: _Port | None = None
        self.all = list(self.ports)
        if uplink:
            self.uplink = _Port(uplink, self)
            self.all.append(self.uplink)
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.loss = loss
        self._port_of: dict[bytes, _Port] = {}

    def targets(self, frame: bytes, source: _Port) -> list[_Port]:
        """Return the ports to which a frame goes, and remember the port of its sender."""
        self._port_of[frame[_HEADER_BYTES + 6 : _HEADER_BYTES + 12]] = source
        target = self._port_of.get(frame[_HEADER_BYTES : _HEADER_BYTES + 6])
        if target is not None:
            return [target]
        # Broadcasts, and frames to a host that has not sent yet, go to all.
        return [port for port in self.all if port is not source]


class _Switch:
    """The junctions and the frames that they hold."""

    def __init__(self, configuration: list[dict[str, Any]]) -> None:
        self._ports: list[_Port] = []
        for junction in configuration:
            self._ports += _Junction(**junction).all
        # Due time, number of the frame so that frames are not compared, port, frame.
        self._held: list[tuple[float, int, _Port, bytes]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Forward frames until standard input ends."""
        while True:
            timeout = None
            if self._held:
                timeout = max(0.0, self._held[0][0] - time.monotonic())
            # Not epoll, whose timeout is rounded to milliseconds.
            ready, _, _ = select.select([sys.stdin, *self._ports], [], [], timeout)
            for each in ready:
                if isinstance(each, _Port):
                    self._receive(each)
                elif not os.read(each.fileno(), 1):
                    return
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                _, _, port, frame = heapq.heappop(self._held)
                # A full queue or a cut link loses the frame.
                with contextlib.suppress(OSError):
                    port.socket.send(frame)

    def _receive(self, source: _Port) -> None:
        junction = source.junction
        for _ in range(_BATCH):
            try:
                frame = source.socket.recv(_FRAME_BYTES)
            except OSError:  # no frame is left, or the link has been cut
                return
            now = time.monotonic()
            # Without an answer to ARP, a host would wait for a second.
            is_arp = frame[_HEADER_BYTES + 12 : _HEADER_BYTES + 14] == _ETH_P_ARP
            for target in junction.targets(frame, source):
                due = now
                # A frame between two racks passes three junctions, and only the junction between
                # the racks delays it.
                if source is not junction.uplink and target is not junction.uplink:
                    if junction.loss and random.random() < junction.loss and not is_arp:
                        continue
                    due += junction.delay_s + random.uniform(-junction.jitter_s, junction.jitter_s)
                # Jitter must not change the order of frames, because a link keeps it.
                target.last_due = due = max(due, target.last_due)
                heapq.heappush(self._held, (due, next(self._numbers), target, frame))


def _main() -> None:
    # A real switch does not wait for the processors of the hosts. Only root may ask for this.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    switch = _Switch(json.loads(sys.argv[1]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    switch.run()


if __name__ == "__main__":
    _main()
