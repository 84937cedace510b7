"""Connect only to a server that proves to be the expected master.

The proof is described in :mod:`mlbench_core.client.masters`. Import this module late: it loads
``requests``.
"""

from __future__ import annotations

import hmac
import secrets
from http.client import HTTPException, HTTPResponse
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NewConnectionError

from mlbench_core.addresses import bracketed
from mlbench_core.client.masters import NONCE_HEADER, PROOF_HEADER, make_proof

__all__ = ["ProvenAdapter"]

_LONGEST_ANSWER_BYTES = 65_536


class ProvenAdapter(HTTPAdapter):
    """A transport of ``requests`` that demands the proof on each new connection.

    A server that does not give it looks like one that does not answer:
    ``requests.ConnectionError``.

    Args:
        key: The key that the server must know.
        **options: Those of ``HTTPAdapter``.
    """

    def __init__(self, key: str, **options: Any) -> None:
        self._key = key
        super().__init__(**options)

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        key = self._key

        class Proven(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                _demand_proof(self, key)

        class ProvenTLS(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                _demand_proof(self, key)

        class Pool(HTTPConnectionPool):
            ConnectionCls = Proven

        class PoolTLS(HTTPSConnectionPool):
            ConnectionCls = ProvenTLS

        # Within connect, because a pool connects again whenever the server has closed an idle
        # connection. By then another program may have the port.
        self.poolmanager.pool_classes_by_scheme = {"http": Pool, "https": PoolTLS}


def _demand_proof(connection: HTTPConnection, key: str) -> None:
    """Ask the server for the proof on a connection that was just opened."""
    nonce = secrets.token_hex(16)
    lines = (
        "GET /api/health/ HTTP/1.1",
        f"Host: {bracketed(connection.host)}:{connection.port}",
        f"{NONCE_HEADER}: {nonce}",
        "\r\n",
    )
    try:
        connection.sock.sendall("\r\n".join(lines).encode())
        address, port = connection.sock.getpeername()[:2]
        # The connection's own methods cannot be used: it is in the middle of the caller's request.
        with HTTPResponse(connection.sock, method="GET") as response:
            response.begin()
            # The caller's answer follows on the same connection, so this one must be read to its
            # end.
            is_whole = len(response.read(_LONGEST_ANSWER_BYTES)) < _LONGEST_ANSWER_BYTES
            proof = response.headers.get(PROOF_HEADER, "").encode("latin-1", "replace")
        problem = (
            f"answers with HTTP {response.status} and is not the master that this user started"
        )
        if is_whole and hmac.compare_digest(proof, make_proof(key, nonce, address, port).encode()):
            return
    except OSError as error:
        problem = f"does not answer ({type(error).__name__})"
    except HTTPException as error:
        problem = (
            f"answers wrongly ({type(error).__name__}) and is not the master that this user started"
        )
    connection.close()
    raise NewConnectionError(connection, f"the server there {problem}")
