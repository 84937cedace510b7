"""The master's REST API, as the command uses it: synchronous, with time limits, every failure one clear line."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from mlbench_core.errors import ConfigurationError, MasterRequestError

if TYPE_CHECKING:
    import requests

__all__ = ["FINAL_STATES", "MasterClient", "normalize_url"]

FINAL_STATES = frozenset({"finished", "failed", "stopped", "lost"})
"""States that a run never leaves."""


def normalize_url(url: str) -> str:
    """The base address of a master, without a final slash, with a scheme.

    Args:
        url: As a person types it.

    Returns:
        The address.

    Raises:
        ConfigurationError: It has no host, or a scheme other than http and https.

    Example:
        >>> normalize_url("localhost:5080/")
        'http://localhost:5080'
    """
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(full)
        _ = parts.port  # raises on a port that is no number
    except ValueError as error:
        raise ConfigurationError(
            f"{url!r} is no address of a master ({error}); example: http://127.0.0.1:5080"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{url!r} is no address of a master; example: http://127.0.0.1:5080")
    return full.rstrip("/")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class MasterClient:
    """Talks to one master.

    Args:
        url: Its address, for example ``"http://127.0.0.1:5080"``.
        token: Sent as ``Authorization: Bearer``, where there is one.
        timeout_s: Seconds to wait for a connection and for each piece of an answer.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        import requests

        self.url = normalize_url(url)
        self.timeout_s = timeout_s
        self._token = token
        self._session = requests.Session()
        if _is_loopback(self.url):
            self._session.trust_env = False  # a proxy for the world outside must not see this machine's master
        self._session.auth = self._sign  # an auth callable: a .netrc entry must not replace the token

    def _sign(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def __enter__(self) -> MasterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: str, path: str, stream: bool = False, **options: Any) -> requests.Response:
        import requests

        try:
            response = self._session.request(
                method, f"{self.url}/api/{path}", timeout=self.timeout_s, stream=stream, **options
            )
        except requests.Timeout:
            raise MasterRequestError(f"the master at {self.url} did not answer within {self.timeout_s:g} s") from None
        except requests.ConnectionError as error:
            raise MasterRequestError(f"cannot reach the master at {self.url}: {_reason(error)}") from error
        except requests.RequestException as error:
            raise MasterRequestError(f"the request to the master at {self.url} failed: {error}") from error
        if response.status_code >= 400:
            with response:
                raise MasterRequestError(self._refusal(response), response.status_code)
        return response

    def _refusal(self, response: requests.Response) -> str:
        status = response.status_code
        if status in (401, 403):
            said = "does not accept the token" if self._token else "needs a token"
            return f"the master at {self.url} {said} (HTTP {status}): set MLBENCH_TOKEN to the one it was started with"
        return f"{_message(response)} (HTTP {status} from {self.url})"

    def _json(self, method: str, path: str, **options: Any) -> Any:
        import requests

        try:
            return self._send(method, path, **options).json()
        except requests.JSONDecodeError:
            raise MasterRequestError(f"{self.url} answered, but not as an MLBench master does: no JSON") from None
        except requests.RequestException as error:
            raise MasterRequestError(f"the answer of the master at {self.url} broke off: {error}") from error

    def _object(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self._json(method, path, **options)
        if not isinstance(answer, dict):
            raise MasterRequestError(f"{self.url} answered, but not as an MLBench master does: no JSON object")
        return answer

    def health(self) -> dict[str, Any]:
        """``{"status": "ok", "version": ...}``."""
        return self._object("GET", "health/")

    def runs(self) -> list[dict[str, Any]]:
        """All runs."""
        answer = self._json("GET", "runs/")
        if not isinstance(answer, list):
            raise MasterRequestError(f"{self.url} answered, but not as an MLBench master does: no list of runs")
        return answer

    def run(self, run_id: int | str) -> dict[str, Any]:
        """The run with an id."""
        return self._object("GET", f"runs/{quote(str(run_id), safe='')}/")

    def find(self, name: str) -> dict[str, Any]:
        """The run with a name, or with an id where no run has the name.

        Raises:
            MasterRequestError: There is none; the message lists the last ones.
        """
        runs = self.runs()
        for key in ("name", "id"):
            found = [run for run in runs if str(run.get(key)) == name]
            if found:
                return found[-1]
        known = ", ".join(str(run.get("name")) for run in runs[-10:]) or "none yet"
        raise MasterRequestError(f"no run {name!r} at {self.url}; runs there: {known}", 404)

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run; returns it."""
        return self._object("POST", "runs/", json=dict(request))

    def stop(self, run_id: int | str) -> None:
        """Stop a run, keeping its metrics."""
        self._send("POST", f"runs/{run_id}/stop/").close()

    def delete(self, run_id: int | str) -> None:
        """Stop a run and delete all of it."""
        self._send("DELETE", f"runs/{run_id}/").close()

    def logs(self, run_id: int | str, since_line: int = 0) -> tuple[list[dict[str, Any]], int]:
        """All lines of a run's log from ``since_line`` on, and the number to go on from next time."""
        lines: list[dict[str, Any]] = []
        while True:  # the master may answer in pages
            answer = self._object("GET", f"runs/{run_id}/logs/", params={"since_line": since_line})
            page = answer.get("lines") or []
            lines += page
            following = int(answer.get("next", since_line + len(page)))
            if not page or following <= since_line:
                return lines, since_line
            since_line = following

    def metrics(
        self, run_id: int | str, metric_filter: str | None = None, last_n: int | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """Metrics of a run: ``{name: [{"date", "value", "cumulative"}, ...]}``, oldest first.

        Args:
            run_id: The run.
            metric_filter: Only the metric with exactly this name.
            last_n: At most this many of the latest entries of each metric.
        """
        options = {"metric_type": "run", "metric_filter": metric_filter, "last_n": last_n}
        return self._object(
            "GET", f"metrics/{run_id}/", params={key: value for key, value in options.items() if value is not None}
        )

    def download(self, run_id: int | str, path: Path) -> int:
        """Stream the zip of a run's metrics into a file.

        Returns:
            Its size in bytes.

        Raises:
            MasterRequestError: The download broke off.
        """
        import requests

        size_bytes = 0
        options = {"metric_type": "run", "format": "zip"}
        with self._send("GET", f"metrics/{run_id}/", stream=True, params=options) as response, path.open("wb") as file:
            try:
                for chunk in response.iter_content(1 << 16):
                    size_bytes += file.write(chunk)
            except requests.RequestException as error:
                raise MasterRequestError(f"the download from {self.url} broke off after {size_bytes} bytes") from error
        return size_bytes


def _message(response: requests.Response) -> str:
    try:
        answer = response.json()
    except ValueError:
        return f"the master refused the request: {response.reason}"
    if isinstance(answer, dict):
        text = answer.get("message") or answer.get("detail") or answer.get("error")
        if text:
            return text if isinstance(text, str) else str(text)
    return f"the master refused the request: {str(answer)[:300]}"


def _reason(error: BaseException) -> str:
    """What the operating system said, dug out of the layers that requests and urllib3 put around it."""
    text = str(error)
    if "refused" in text:
        return "connection refused; is it running?"
    if "Name or service not known" in text or "resolve" in text or "getaddrinfo" in text:
        return "unknown host"
    if "aborted" in text or "reset" in text.lower():
        return "it closed the connection"
    return text.rsplit(": ", 1)[-1].rstrip("')\"")
