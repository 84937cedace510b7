"""HTTP requests to a master: addresses, authentication, time limits, retries and errors.

No other module speaks HTTP to the master, except the transport in
:mod:`mlbench_core.client.proven_server`: :class:`~mlbench_core.client.api.ApiClient` and the
``mlbench`` command send through :class:`RestClient`. Importing this module does not load
``requests``.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from mlbench_core.addresses import is_loopback
from mlbench_core.client.masters import check_token, find_credentials
from mlbench_core.errors import MasterAddressError, MasterRequestError

if TYPE_CHECKING:
    import requests
    from typing_extensions import Self

__all__ = ["TOKEN_ADVICE", "RestClient", "base_url", "message_of", "path_part", "reason"]

TOKEN_ADVICE = "set MLBENCH_TOKEN to the token that the master was started with"

# Files of certificate authorities for https; the first one counts.
_CA_VARIABLES = ("MLBENCH_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_RETRY_BACKOFF_S = 0.2
_RETRY_STATUSES = (502, 503, 504)
_DOWNLOAD_CHUNK_BYTES = 1 << 16

_Json = TypeVar("_Json", dict[str, Any], list[Any])


class RestClient:
    """Send requests to one master, from any number of threads.

    The token travels in a header and never in a URL. Proxies of the environment are not used for a
    master on this machine. Only GET requests follow redirects. A redirected POST or DELETE would
    become a GET, which changes nothing but succeeds.

    Args:
        url: Address of the master, see :func:`base_url`.
        token: Sent as ``Authorization: Bearer``. By default the token of a master that this user
            runs at this address; the server must then prove first that it is this master, see
            :mod:`mlbench_core.client.masters`.
        timeout_s: Time limit for connecting and for each wait for an answer, in seconds.
        retries: Number of times that a GET request is repeated, with back-off, after a failed
            connection or a temporary error of a proxy (status 502, 503 or 504).

    Attributes:
        url: The address, with a scheme and without a final slash.
        timeout_s: The time limit in seconds.

    Raises:
        MasterAddressError: ``url`` is not an address.
        MasterTokenError: ``token`` has characters that a request cannot carry.
    """

    def __init__(
        self, url: str, token: str | None = None, timeout_s: float = 30.0, retries: int = 0
    ) -> None:
        self.url = base_url(url)
        self.timeout_s = timeout_s
        self._token = check_token(token) if token else None
        self._credentials = find_credentials(self.url, self._token)
        self._retries = retries
        # The sessions of requests are not documented as thread-safe, so each thread has its own. A
        # weak reference lets the session of a thread that has ended be closed with it.
        self._local = threading.local()
        self._sessions: weakref.WeakSet[requests.Session] = weakref.WeakSet()
        self._lock = threading.Lock()

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """Send a request and return the response, whatever its status.

        Args:
            method: For example ``"GET"``.
            path: Path below ``/api/``. Parts that users choose must be quoted by :func:`path_part`.
            **options: Options of ``requests.Session.request``.

        Returns:
            The response.

        Raises:
            requests.RequestException: The request failed.
        """
        options = {"timeout": self.timeout_s, "allow_redirects": method == "GET", **options}
        # Given with each request, because the environment overrules the setting of a session.
        for name in _CA_VARIABLES:
            if os.environ.get(name):
                options.setdefault("verify", os.environ[name])
        response = self._session().request(method, f"{self.url}/api/{path}", **options)
        if response.status_code == 401 and self._token is None:
            # The master of this user may have started after this client was made.
            credentials = find_credentials(self.url)
            if credentials != self._credentials:
                response.close()
                self._credentials = credentials
                self._local = threading.local()
                response = self._session().request(method, f"{self.url}/api/{path}", **options)
        return response

    def send(self, method: str, path: str, **options: Any) -> requests.Response:
        """Send a request that must succeed; see :meth:`request` for the arguments.

        Returns:
            The response, with a status below 300.

        Raises:
            MasterRequestError: The request failed or was refused. The message is one line for the
                user.
        """
        import requests

        try:
            response = self.request(method, path, **options)
        except requests.Timeout:
            raise MasterRequestError(
                f"the master at {self.url} did not answer within {self.timeout_s:g} s"
            ) from None
        except requests.ConnectionError as error:
            raise MasterRequestError(
                f"cannot reach the master at {self.url}: {reason(error)}"
            ) from error
        except requests.RequestException as error:
            raise MasterRequestError(
                f"the request to the master at {self.url} failed: {error}"
            ) from error
        if response.status_code >= 300:
            # The body of a streamed response is not read yet; leaving the block frees its
            # connection.
            with response:
                raise MasterRequestError(self._refusal(response), response.status_code)
        return response

    def json(self, kind: type[_Json], method: str, path: str, **options: Any) -> _Json:
        """Send a request that must succeed and return its JSON answer.

        Args:
            kind: The expected type of the answer, ``dict`` or ``list``.
            method: See :meth:`request`.
            path: See :meth:`request`.
            **options: See :meth:`request`.

        Returns:
            The decoded answer.

        Raises:
            MasterRequestError: The request failed or was refused, or the server that answered is
                not a master.
        """
        answer = _decoded(self.send(method, path, **options))
        if not isinstance(answer, kind):
            expected = "object" if kind is dict else "list"
            raise MasterRequestError(
                f"{self.url} answered, but not as an MLBench master does: "
                f"expected a JSON {expected}"
            )
        return answer

    def download(self, path: str, target: Path, **options: Any) -> int:
        """Stream an answer into a file.

        Args:
            path: See :meth:`request`.
            target: The file to write.
            **options: See :meth:`request`.

        Returns:
            The file's size in bytes.

        Raises:
            MasterRequestError: The request failed or was refused, or the answer broke off.
        """
        import requests

        size_bytes = 0
        with self.send("GET", path, stream=True, **options) as response, target.open("wb") as file:
            try:
                for chunk in response.iter_content(_DOWNLOAD_CHUNK_BYTES):
                    size_bytes += file.write(chunk)
            except requests.RequestException as error:
                raise MasterRequestError(
                    f"the download from {self.url} broke off after {size_bytes} bytes"
                ) from error
        return size_bytes

    def close(self) -> None:
        """Close all connections; a later request opens new ones."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _session(self) -> requests.Session:
        """Return the session of this thread."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is not None:
            return session
        # Importing this module must not load requests; see the docstring of the module.
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util.retry import Retry

        from mlbench_core.client.proven_server import ProvenAdapter

        session = requests.Session()
        session.trust_env = not is_loopback(urlsplit(self.url).hostname or "")
        # A function, because an entry in .netrc would replace a header that is set directly.
        session.auth = self._sign
        options: dict[str, Any] = {}
        # A policy of 0 retries would turn each timeout into a ConnectionError.
        if self._retries:
            options["max_retries"] = Retry(
                total=self._retries,
                backoff_factor=_RETRY_BACKOFF_S,
                status_forcelist=_RETRY_STATUSES,
                allowed_methods=("GET",),
                raise_on_status=False,
            )
        for scheme in ("http://", "https://"):
            key = self._credentials.key
            session.mount(scheme, ProvenAdapter(key, **options) if key else HTTPAdapter(**options))
        self._local.session = session
        with self._lock:
            self._sessions.add(session)
        return session

    def _sign(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._credentials.token:
            request.headers["Authorization"] = f"Bearer {self._credentials.token}"
        return request

    def _refusal(self, response: requests.Response) -> str:
        status = response.status_code
        if status in (401, 403):
            problem = "does not accept the token" if self._credentials.token else "needs a token"
            return f"the master at {self.url} {problem} (HTTP {status}): {TOKEN_ADVICE}"
        if response.is_redirect:
            return (
                f"{self.url} redirects to {response.headers['Location']} (HTTP {status}): "
                "use that address"
            )
        message = message_of(response) or f"the master refused the request: {response.reason}"
        return f"{message} (HTTP {status} from {self.url})"


def base_url(url: str) -> str:
    """Return the base address of a master, with a scheme and without ``/api`` and a final slash.

    Args:
        url: The address as a user writes it.

    Returns:
        The base address.

    Raises:
        MasterAddressError: It is not an address, or it holds more than scheme, host, port and path.

    Example:
        >>> base_url("10.0.0.7:80"), base_url("https://mlbench.example.org/api/")
        ('http://10.0.0.7:80', 'https://mlbench.example.org')
    """
    text = url.strip()
    full = text if "://" in text else f"http://{text}"
    # The message must not show the password.
    if "@" in full:
        raise MasterAddressError(
            f"the url of the master must be without user name and password: {TOKEN_ADVICE}"
        )
    try:
        parts = urlsplit(full)
        # Raises ValueError if it is not a port number.
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_address = parts.scheme in ("http", "https") and parts.hostname and port != 0
    has_more = parts.query or parts.fragment or any(map(str.isspace, full))
    if not is_address or has_more:
        raise MasterAddressError(
            f"the url of the master must be HOST:PORT or http://HOST:PORT, not {url!r}; "
            "for example http://127.0.0.1:5080"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/api')}"


def _decoded(response: requests.Response) -> Any:
    """Return the JSON value of an answer, or None if it is not JSON."""
    try:
        return response.json()
    except ValueError:
        return None


def message_of(response: requests.Response) -> str | None:
    """Return the reason of a refusal by this version's master, or None for other servers."""
    answer = _decoded(response)
    if not isinstance(answer, dict) or answer.get("message") is None:
        return None
    return str(answer["message"])


def path_part(value: str | int) -> str:
    """Quote an id or a name for use as one part of a path."""
    return quote(str(value), safe="")


def reason(error: Exception) -> str:
    """Return the reason of a failed request, without the additions of requests and urllib3."""
    text = str(error)
    if "refused" in text:
        return "connection refused; is it running?"
    if "Name or service not known" in text or "resolve" in text or "getaddrinfo" in text:
        return "unknown host"
    if "aborted" in text or "reset" in text.lower():
        return "it closed the connection"
    return text.rsplit(": ", 1)[-1].rstrip("')\"")
