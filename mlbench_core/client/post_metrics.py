"""Post metrics to one master, and find the metrics that it will never accept.

A list of lines goes out as one request. A list that is not accepted is divided until the cause is
found, so that one bad metric delays no other. The states of a list and of a line::

    list  -- accepted --------> delivered
          -- refused, or 500 -> each half is a list

    line  -- accepted ------> delivered
          -- refused (4xx) -> dropped with a warning
                              if its run is wrong, all other lines of the run are dropped, too
          -- 500 -----------> the list of runs lacks its run: dropped with the run's other lines
                              otherwise SUSPECT, and the next line is posted
          -- anything else, or no answer -> the master is away: every line is kept

    suspect -- accepted at the second or third attempt -> delivered
            -- three times 500, then the master accepts another line -> dropped with a warning
            -- three times 500, and the master accepts no other line -> the master is away

The suspects exist because a status 500 does not show the cause. The master of version 3.0 answers
500 to a metric of a deleted run, and a master whose database is broken answers 500 to everything.
If such a master recovers between two attempts, suspects arrive after later lines, each once.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from mlbench_core.client.rest import TOKEN_ADVICE, message_of, reason
from mlbench_core.errors import MasterRequestError

if TYPE_CHECKING:
    import requests

__all__ = ["ListRuns", "NoAnswer", "Post", "Poster"]

logger = logging.getLogger(__name__)
# A separate generator: a draw from the global one would change the results of a seeded run.
_random = random.Random()

# requests does not accept a time limit of 0 or less.
_SHORTEST_TIMEOUT_S = 0.05
# Before the second and the third attempt.
_PAUSES_S = (0.25, 0.5)
# After this number of suspects in a row the master itself may be broken.
_SUSPECTS_IN_A_ROW = 3
_PROBES = 5
# One pair may be accepted line by line by chance, because a master recovered between the requests.
_PAIRS_THAT_SHOW_NO_LISTS = 2
_INTERNAL_ERROR = "it answers 500 Internal Server Error"
_TOKEN_NEEDED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_TEMPORARY = _TOKEN_NEEDED | {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
}

Post = Callable[[str, float], "requests.Response"]
ListRuns = Callable[[float], "requests.Response"]
Settle = Callable[[int, "requests.Response | MasterRequestError"], None]
PeekWaiting = Callable[[], "str | None"]


class NoAnswer(Exception):
    """Raised if the master is away, broken, or refuses the token.

    Every line must then be kept and sent again.
    """


@dataclass
class Poster:
    """Deliver lines to one master; used by one thread at a time.

    Args:
        post: Sends a JSON text within a time limit in seconds and returns the answer.
        list_runs: Asks for the list of runs within a time limit in seconds.
        timeout_s: Time limit of one request, in seconds.
        stop: Set when the client is closed, which ends pauses.

    Attributes:
        unknown_runs: Ids of runs that the master does not have; their metrics are dropped.
        early_answers: Answers to lines that were posted before their turn, by the id of the metric.
        pairs_accepted_singly: Number of pairs of lines that the master refused together and then
            accepted one by one.
    """

    post: Post
    list_runs: ListRuns
    timeout_s: float
    stop: threading.Event
    unknown_runs: set[str] = field(default_factory=set)
    early_answers: dict[str, requests.Response] = field(default_factory=dict)
    pairs_accepted_singly: int = 0

    def deliver(
        self,
        lines: list[str],
        settle: Settle,
        peek_waiting: PeekWaiting,
        deadline: float | None = None,
    ) -> None:
        """Post lines in order.

        Args:
            lines: JSON texts, each with an ``id``.
            settle: Called with the index of each line and the answer to it, or the reason why it is
                dropped. A line for which it was not called must be delivered again.
            peek_waiting: Returns a line that waits behind these ones, or None. It may be posted
                before its turn.
            deadline: End of the time limit on the monotonic clock, or None.

        Raises:
            NoAnswer: The master does not answer.
        """
        _Delivery(self, lines, settle, peek_waiting, deadline).run()


@dataclass
class _Delivery:
    """The delivery of some lines, as the module's docstring describes it."""

    poster: Poster
    lines: list[str]
    settle: Settle
    peek_waiting: PeekWaiting
    deadline: float | None
    # Indexes of lines; the list to post next is the last one.
    todo: list[list[int]] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    in_a_row: int = 0
    most_in_a_row: int = _SUSPECTS_IN_A_ROW
    # The last line, to be posted after the suspects' attempts.
    held_back: list[int] = field(default_factory=list)
    known_runs: set[str] = field(default_factory=set)
    refused_pair: set[int] = field(default_factory=set)
    any_accepted: bool = False

    def run(self) -> None:
        self.todo = [self.without_early(list(range(len(self.lines))))]
        while self.todo:
            part = self.without_unknown_runs(self.todo.pop())
            # The master of version 3.0 accepts one metric in a request, so lists are not tried
            # again and again.
            if len(part) > 1 and self.poster.pairs_accepted_singly >= _PAIRS_THAT_SHOW_NO_LISTS:
                self.todo += [[index] for index in reversed(part)]
            elif part:
                self.deliver(part)
            if self.in_a_row >= self.most_in_a_row:
                self.require_an_accepted_line()
                # The master works and there are many bad lines, so later checks can be rarer.
                self.most_in_a_row *= 2
        if self.suspects:
            self.retry_suspects()

    def deliver(self, part: list[int]) -> None:
        """Post lines together; after a refusal, divide them, or suspect or drop a single one."""
        response = self.post(part)
        is_doubtful = response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        if response.ok:
            self.accept(part, response)
        elif len(part) > 1:
            if len(part) == 2:
                self.refused_pair = set(part)
            cut = len(part) // 2
            # A broken master shows it on the first line, so dividing the whole list would waste
            # requests.
            if is_doubtful and not self.any_accepted:
                cut = 1
            self.todo += [part[cut:], part[:cut]]
        elif is_doubtful:
            self.suspect(part[0])
        else:
            line = self.lines[part[0]]
            error = MasterRequestError(
                f"the master refused a metric with status {response.status_code}, it is dropped: "
                f"{line[:300]} (answer: {response.text[:300]})",
                response.status_code,
            )
            # The master refuses the id itself, such as a text, and will refuse it with the run's
            # other metrics too.
            refuses_id = (message_of(response) or "").startswith("run_id: ")
            run = None
            if refuses_id or response.status_code == HTTPStatus.NOT_FOUND:
                run = _run_of(line)
            if run is None:
                logger.warning("%s", error)
            self.settle(part[0], error)
            if run is not None:
                self.forget_run(run)

    def accept(self, part: list[int], response: requests.Response) -> None:
        for index in part:
            self.settle(index, response)
        self.any_accepted = True
        self.in_a_row = 0
        if len(part) == 1 and self.refused_pair:
            self.refused_pair -= set(part)
            if not self.refused_pair:
                self.poster.pairs_accepted_singly += 1

    def suspect(self, index: int) -> None:
        run = _run_of(self.lines[index])
        if run is not None and run not in self.known_runs:
            if self.is_deleted(run):
                self.forget_run(run)
                self.without_unknown_runs([index])
                return
            self.known_runs.add(run)
        self.suspects.append(index)
        self.in_a_row += 1
        if not self.held_back and self.todo:
            self.held_back.append(self.todo[0].pop())
            if not self.todo[0]:
                del self.todo[0]

    def retry_suspects(self) -> None:
        """Post the suspects two more times; drop them if the master then accepts another line."""
        # Without any other line, nothing could show that the master works.
        if not self.held_back and self.peek_waiting() is None:
            raise NoAnswer(_INTERNAL_ERROR)
        for pause_s in _PAUSES_S:
            too_late = self.deadline is not None and time.monotonic() + pause_s > self.deadline
            if too_late or self.poster.stop.wait(pause_s):
                raise NoAnswer(_INTERNAL_ERROR)
            for index in list(self.suspects):
                response = self.post([index])
                if response.ok:
                    self.suspects.remove(index)
                    self.accept([index], response)
        self.require_an_accepted_line()
        if not self.suspects:
            return
        error = MasterRequestError(
            f"the master answers 500 to {len(self.suspects)} metric(s) and takes others; after "
            f"three attempts they are dropped, the first is {self.lines[self.suspects[0]][:300]}",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        logger.warning("%s", error)
        for index in self.suspects:
            self.settle(index, error)

    def require_an_accepted_line(self) -> None:
        """Post other lines until one is accepted, to distinguish bad lines from a broken master.

        Raises:
            NoAnswer: Several of them are not accepted either, or nothing else waits.
        """
        limit = len(self.suspects) + _PROBES
        while self.todo or self.held_back:
            # Bad lines often follow one another, so the lines to probe with are chosen at random.
            part = _random.choice(self.todo or [self.held_back])
            index = part.pop(_random.randrange(len(part)))
            self.todo = list(filter(None, self.todo))
            if self.without_unknown_runs([index]):
                self.any_accepted = False
                self.deliver([index])
            if self.any_accepted:
                return
            if len(self.suspects) >= limit:
                raise NoAnswer(_INTERNAL_ERROR)
        line = self.peek_waiting()
        if line is None:
            raise NoAnswer(_INTERNAL_ERROR)
        response = self.ask(line)
        if not response.ok:
            raise NoAnswer(_INTERNAL_ERROR)
        # The master of version 3.0 knows no ids and would store the line twice if it were sent
        # again in its turn.
        self.poster.early_answers[_id_of(line)] = response
        self.in_a_row = 0

    def without_early(self, part: list[int]) -> list[int]:
        """Settle the lines that were posted before their turn, and return the other ones."""
        early = self.poster.early_answers
        # In the usual case, no line is decoded.
        if not early:
            return part
        left = []
        for index in part:
            answer = early.pop(_id_of(self.lines[index]), None)
            if answer is None:
                left.append(index)
            else:
                self.settle(index, answer)
        return left

    def without_unknown_runs(self, part: list[int]) -> list[int]:
        """Settle metrics of runs that the master does not have, and return the other ones."""
        if not self.poster.unknown_runs:
            return part
        error = MasterRequestError(
            "the master does not know the metric's run", HTTPStatus.NOT_FOUND
        )
        left = []
        for index in part:
            if _run_of(self.lines[index]) in self.poster.unknown_runs:
                self.settle(index, error)
            else:
                left.append(index)
        return left

    def forget_run(self, run: str) -> None:
        self.poster.unknown_runs.add(run)
        logger.warning("the master has no run %s: the run's metrics are dropped", run)

    def is_deleted(self, run: str) -> bool:
        """Return True if the master lists its runs and this one is not among them."""
        response = self.request(self.poster.list_runs)
        if not response.ok:
            return False
        try:
            runs = response.json()
        except ValueError:
            return False
        if not isinstance(runs, list):
            return False
        return run not in [str(entry.get("id")) for entry in runs if isinstance(entry, dict)]

    def post(self, part: list[int]) -> requests.Response:
        body = ",".join([self.lines[index] for index in part])
        if len(part) > 1:
            body = f"[{body}]"
        return self.ask(body)

    def ask(self, body: str) -> requests.Response:
        """Post a body and return an answer that is final, or a 500.

        Raises:
            NoAnswer: The master gives no such answer.
        """
        response = self.request(partial(self.poster.post, body))
        status = response.status_code
        if response.ok or _is_refused(response) or status == HTTPStatus.INTERNAL_SERVER_ERROR:
            return response
        problem = f"it answers {status} {response.reason}"
        if status in _TOKEN_NEEDED:
            problem += f": {TOKEN_ADVICE}"
        raise NoAnswer(problem)

    def request(self, send: Callable[[float], requests.Response]) -> requests.Response:
        limit_s = self.poster.timeout_s
        if self.deadline is not None:
            limit_s = max(min(limit_s, self.deadline - time.monotonic()), _SHORTEST_TIMEOUT_S)
        try:
            return send(limit_s)
        # Each requests.RequestException is an OSError.
        except OSError as error:
            raise NoAnswer(reason(error)) from error


def _run_of(line: str) -> str | None:
    metric: dict[str, Any] = json.loads(line)
    run = metric.get("run_id")
    return None if run is None else str(run)


def _id_of(line: str) -> str:
    return str(json.loads(line).get("id"))


def _is_refused(response: requests.Response) -> bool:
    """Return True if the master itself can never accept the lines."""
    status = response.status_code
    # A user can correct a missing or wrong token while the metrics wait.
    if not 400 <= status < 500 or status in _TEMPORARY:
        return False
    if status == HTTPStatus.NOT_FOUND:
        # A proxy in front of a master that is away answers 404 with a page of HTML.
        return response.headers.get("Content-Type", "").startswith("application/json")
    return True
