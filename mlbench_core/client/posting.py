"""Posting metrics to one master, and finding those that it will never take.

Lines go out together. A list that is not accepted is divided until the cause is found, so that one bad metric holds
up no other::

    list  -- accepted --> delivered
          -- refused, or 500 --> each half

    one line  -- accepted --> delivered
              -- refused (4xx) --> dropped with a warning; after a 404 with all others of its run
              -- 500 --> its run is not in the list of runs: dropped with all others of the run
                     --> else put aside, and the next one is tried
              -- anything else, or no answer --> the master is away: everything is kept

A status 500 does not say whose fault it is: the master of version 3.0 answers so to a metric of a deleted run, and
any master whose database is broken answers so to everything. A line is dropped only after three attempts, and only if
the master accepts another line after the last of them. If it accepts none, it counts as away. If such a master
recovers between two attempts, lines that were put aside arrive after later ones, each once.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from mlbench_core.client.rest import TOKEN_ADVICE, reason
from mlbench_core.errors import MasterRequestError

if TYPE_CHECKING:
    import requests

__all__ = ["ListRuns", "NoAnswer", "Post", "Poster"]

logger = logging.getLogger(__name__)

_SHORTEST_TIMEOUT_S = 0.05
_PAUSES_S = (0.25, 0.5)
_ASIDE_IN_A_ROW = 3
_OTHERS_TRIED = 5
_PAIRS_THAT_TELL = 2
_INTERNAL_ERROR = "it answers 500 Internal Server Error"
_TOKEN_NEEDED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_NOT_FOR_GOOD = _TOKEN_NEEDED | {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}

Post = Callable[[str, float], "requests.Response"]
ListRuns = Callable[[float], "requests.Response"]
Settle = Callable[[int, "requests.Response | MasterRequestError"], None]
Borrow = Callable[[], "str | None"]


class NoAnswer(Exception):
    """Raised if the master is away, broken, or refuses our token: keep everything and try again."""


class Poster:
    """Deliver lines to one master; used by one thread at a time.

    Args:
        post: Sends a JSON text within a time limit in seconds and returns the answer.
        list_runs: Asks for the list of runs within a time limit in seconds.
        timeout_s: Time limit of one request, in seconds.
        stop: Set when the client is closed: no more pauses.
    """

    def __init__(self, post: Post, list_runs: ListRuns, timeout_s: float, stop: threading.Event) -> None:
        self._post = post
        self._list_runs = list_runs
        self._timeout_s = timeout_s
        self._stop = stop
        self.gone_runs: set[str] = set()
        self.early: dict[str, requests.Response] = {}  # answers to lines that were delivered before their turn, by id
        self._pairs_accepted_apart = 0

    def deliver(self, lines: list[str], settle: Settle, borrow: Borrow, deadline: float | None) -> None:
        """Post lines in order.

        Args:
            lines: JSON texts, each with an ``id``.
            settle: Called with the index of each line and the answer to it, or the reason why it is dropped. A line
                for which it was not called is to be delivered again.
            borrow: Returns a line that waits behind these ones, or None. It may be posted before its turn.
            deadline: End of the time limit on the monotonic clock, or None.

        Raises:
            NoAnswer: The master does not answer.
        """
        _Delivery(self, lines, settle, borrow, deadline).run()

    @property
    def takes_lists(self) -> bool:
        """True if the master takes several metrics in one request; that of version 3.0 does not."""
        return self._pairs_accepted_apart < _PAIRS_THAT_TELL

    def saw_pair_accepted_apart(self) -> None:
        """Note that the master took two lines one by one after it had refused both together."""
        self._pairs_accepted_apart += 1

    def take_early(self, line: str, deadline: float | None) -> bool:
        """Post a line before its turn and return True if it is accepted.

        Raises:
            NoAnswer: The master does not answer.
        """
        response = self.ask([line], deadline)
        if response.ok:
            self.early[_id_of(line)] = response
        return response.ok

    def ask(self, lines: list[str], deadline: float | None) -> requests.Response:
        """Post lines as one request and return an answer that is final, or a 500.

        Raises:
            NoAnswer: There is none.
        """
        body = lines[0] if len(lines) == 1 else f"[{','.join(lines)}]"
        response = self._request(lambda limit_s: self._post(body, limit_s), deadline)
        if response.ok or _is_refused(response) or response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            return response
        advice = f": {TOKEN_ADVICE}" if response.status_code in _TOKEN_NEEDED else ""
        raise NoAnswer(f"it answers {response.status_code} {response.reason}{advice}")

    def is_gone(self, run_id: str, deadline: float | None) -> bool:
        """Return True if the master lists its runs and this one is not among them.

        Raises:
            NoAnswer: The master does not answer.
        """
        response = self._request(self._list_runs, deadline)
        try:
            runs = response.json() if response.ok else None
        except ValueError:
            runs = None
        return isinstance(runs, list) and run_id not in {str(run.get("id")) for run in runs if isinstance(run, dict)}

    def pause(self, pause_s: float, deadline: float | None) -> None:
        """Wait before the next attempt.

        Raises:
            NoAnswer: There is no time for it.
        """
        too_late = deadline is not None and time.monotonic() + pause_s > deadline
        if too_late or self._stop.wait(pause_s):
            raise NoAnswer(_INTERNAL_ERROR)

    def _request(self, send: Callable[[float], requests.Response], deadline: float | None) -> requests.Response:
        limit_s = self._timeout_s
        if deadline is not None:
            limit_s = max(min(limit_s, deadline - time.monotonic()), _SHORTEST_TIMEOUT_S)
        try:
            return send(limit_s)
        except OSError as error:  # each requests.RequestException is one
            raise NoAnswer(reason(error)) from error


class _Delivery:
    """Deliver some lines as the module's description says."""

    def __init__(
        self, poster: Poster, lines: list[str], settle: Settle, borrow: Borrow, deadline: float | None
    ) -> None:
        self._poster = poster
        self._lines = lines
        self._settle = settle
        self._borrow = borrow
        self._deadline = deadline
        self._todo: list[list[int]] = [list(range(len(lines)))]  # indexes of lines, the next ones at the end
        self._aside: list[int] = []
        self._aside_in_a_row = 0
        self._most_in_a_row = _ASIDE_IN_A_ROW
        self._witness: list[int] = []  # the last line, kept back once a line is put aside
        self._known_runs: set[str] = set()
        self._refused_pair: set[int] = set()
        self._any_accepted = False

    def run(self) -> None:
        self._skip_early()
        while self._todo:
            part = self._without_gone(self._todo.pop())
            if len(part) > 1 and not self._poster.takes_lists:
                self._todo += [[index] for index in reversed(part)]
            elif part:
                self._try(part)
            if self._aside_in_a_row >= self._most_in_a_row:
                self._see_one_accepted()
                self._most_in_a_row *= 2  # many bad lines, then, and a master that works
        if self._aside:
            self._try_again_or_drop()

    def _try(self, part: list[int]) -> None:
        """Post lines together; divide them, put one aside or drop it if they are not accepted."""
        response = self._ask(part)
        is_doubtful = response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        if response.ok:
            self._accepted(part, response)
        elif len(part) > 1:
            if len(part) == 2:
                self._refused_pair = set(part)
            # A master that is broken shows it on the first line; no need to divide everything.
            cut = 1 if is_doubtful and not self._any_accepted else len(part) // 2
            self._todo += [part[cut:], part[:cut]]
        elif is_doubtful:
            self._put_aside(part[0])
        else:
            error = _refusal(self._lines[part[0]], response)
            logger.warning("%s", error)
            self._settle(part[0], error)
            if response.status_code == HTTPStatus.NOT_FOUND:
                self._forget_run(_run_of(self._lines[part[0]]))

    def _ask(self, part: list[int]) -> requests.Response:
        return self._poster.ask([self._lines[index] for index in part], self._deadline)

    def _accepted(self, part: list[int], response: requests.Response) -> None:
        for index in part:
            self._settle(index, response)
        self._any_accepted = True
        self._aside_in_a_row = 0
        if len(part) == 1 and self._refused_pair:
            self._refused_pair -= set(part)
            if not self._refused_pair:
                self._poster.saw_pair_accepted_apart()

    def _put_aside(self, index: int) -> None:
        run = _run_of(self._lines[index])
        if run is not None and run not in self._known_runs:
            if self._poster.is_gone(run, self._deadline):
                self._forget_run(run)
                self._without_gone([index])
                return
            self._known_runs.add(run)
        self._aside.append(index)
        self._aside_in_a_row += 1
        if not self._witness and self._todo:
            self._witness.append(self._todo[0].pop())
            if not self._todo[0]:
                del self._todo[0]

    def _try_again_or_drop(self) -> None:
        """Give the lines put aside two more chances; drop them if the master takes another one after that."""
        if not self._witness and self._borrow() is None:
            raise NoAnswer(_INTERNAL_ERROR)
        for pause_s in _PAUSES_S:
            self._poster.pause(pause_s, self._deadline)
            for index in list(self._aside):
                response = self._ask([index])
                if response.ok:
                    self._aside.remove(index)
                    self._accepted([index], response)
        self._see_one_accepted()
        if not self._aside:
            return
        error = MasterRequestError(
            f"the master answers 500 to {len(self._aside)} metric(s) and takes others; after three attempts they are "
            f"dropped, the first is {self._lines[self._aside[0]][:300]}",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        logger.warning("%s", error)
        for index in self._aside:
            self._settle(index, error)

    def _see_one_accepted(self) -> None:
        """Post other lines until one is accepted, to tell bad lines from a broken master.

        Raises:
            NoAnswer: Several of them are not accepted either, or nothing else waits.
        """
        limit = len(self._aside) + _OTHERS_TRIED
        while waiting := self._todo or ([self._witness] if self._witness else []):
            part = random.choice(waiting)
            index = part.pop(random.randrange(len(part)))
            self._todo = [part for part in self._todo if part]
            if self._without_gone([index]):
                self._any_accepted = False
                self._try([index])
            if self._any_accepted:
                return
            if len(self._aside) >= limit:
                raise NoAnswer(_INTERNAL_ERROR)
        line = self._borrow()
        if line is None or not self._poster.take_early(line, self._deadline):
            raise NoAnswer(_INTERNAL_ERROR)
        self._aside_in_a_row = 0

    def _skip_early(self) -> None:
        """Settle the lines that were delivered before their turn."""
        early = self._poster.early
        if early:
            ids = [_id_of(line) for line in self._lines]
            for index in [index for index, known in enumerate(ids) if known in early]:
                self._settle(index, early.pop(ids[index]))
                self._todo[0].remove(index)

    def _forget_run(self, run: str | None) -> None:
        if run is not None:
            self._poster.gone_runs.add(run)
            logger.warning("the master has no run %s: the run's metrics are dropped", run)

    def _without_gone(self, part: list[int]) -> list[int]:
        """Leave out the metrics of runs that the master does not have, and say so to those who wait for them."""
        gone = self._poster.gone_runs
        if not gone:
            return part
        error = MasterRequestError("the master does not know the metric's run", HTTPStatus.NOT_FOUND)
        left = []
        for index in part:
            if _run_of(self._lines[index]) in gone:
                self._settle(index, error)
            else:
                left.append(index)
        return left


def _run_of(line: str) -> str | None:
    metric: dict[str, Any] = json.loads(line)
    run = metric.get("run_id")
    return None if run is None else str(run)


def _id_of(line: str) -> str:
    return str(json.loads(line).get("id"))


def _is_refused(response: requests.Response) -> bool:
    """Return True if the master itself says that it can never accept this.

    A 404 without a JSON body comes from a proxy in front of a master that is away; a missing or wrong token can be
    put right while the metrics wait.
    """
    status = response.status_code
    if not 400 <= status < 500 or status in _NOT_FOR_GOOD:
        return False
    if status == HTTPStatus.NOT_FOUND:
        return response.headers.get("Content-Type", "").startswith("application/json")
    return True


def _refusal(line: str, response: requests.Response) -> MasterRequestError:
    return MasterRequestError(
        f"the master refused a metric with status {response.status_code}, it is dropped: "
        f"{line[:300]} (answer: {response.text[:300]})",
        response.status_code,
    )
