"""Stands for ``python``: asks the server of tests/helpers/forked.py to fork a process for the given
arguments, passes its signals on, and ends as it does.

Usage: fork_client.py SOCKET ARGUMENTS OF PYTHON

It imports little, because it is started once for each process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    # The script may begin, and somebody answer with a signal, before this process has its handlers.
    # Until then, signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    request = [sys.argv[2:], dict(os.environ), os.getcwd()]
    content = json.dumps(request).encode()
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(content)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    answer = connection.recv(4)
    status = int.from_bytes(answer, "big", signed=True) if answer else 1
    if status < 0:  # a signal ended it
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
