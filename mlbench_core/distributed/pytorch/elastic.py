"""Agree on the living workers before an average, and on its outcome after it.

The workers of an elastic run have no common process group of fixed size. They meet in a store that
outlives every worker, for example in the process that starts them. Each round n is::

    worker i                            store
    ASK       -- commits, steps, tokens --> ask/i      of the last round that i asked for
    AGREE     <-- members, donor -----  agreement/n    written once, by a coordinator
    CONNECT   a Gloo group of the members; kept while they stay the same
    HEAL      members that are behind receive the state of the donor
    EXCHANGE  a sum over the group, in which those members have weight 0; or averages of pairs
    COMMIT    --- has the sum? ------>  report/i
              <-- commit or not ------  outcome/n      written once, by a coordinator
                                                       -> round n + 1

The coordinator is the living worker with the lowest number that has asked, or that is a member. If
it dies, the next one takes over. Two workers may both take themselves for the coordinator, so they
write with ``compare_set``, and all obey the value that arrived first. A round is committed only if
all members have reported the sum. So a worker that reads "commit" can apply it, and no worker
applies a sum that another one lacks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mlbench_core.arguments import check_int, check_positive
from mlbench_core.errors import ConfigurationError, WorkerError
from mlbench_core.run_terms import PaidSamples

__all__ = [
    "FIRST_WORKERS_VARIABLE",
    "LEAST_VARIABLE",
    "STORE_VARIABLE",
    "WORKER_VARIABLE",
    "Membership",
    "Round",
    "Rounds",
]

STORE_VARIABLE = "MLBENCH_ELASTIC_STORE"
"""Variable of the workers of an elastic run: the address of the store, as ``HOST:PORT``."""

WORKER_VARIABLE = "MLBENCH_ELASTIC_WORKER"
"""Variable of a worker of an elastic run: its number."""

FIRST_WORKERS_VARIABLE = "MLBENCH_ELASTIC_FIRST_WORKERS"
"""Variable of the workers of an elastic run: the number of workers with which it began."""

LEAST_VARIABLE = "MLBENCH_ELASTIC_LEAST"
"""Variable of the workers of an elastic run: the smallest number of members of a round."""

_PREFIX = "elastic"

_LONGEST_PAUSE_S = 0.05


@dataclass(frozen=True)
class Round:
    """The agreement about a round, the same on all its members.

    Attributes:
        number: Its number, from 0.
        group: The number of the first round with this process group.
        members: The workers that take part, ascending. A worker's rank is its position.
        behind: Those of them whose state is older than that of the others: it has fewer commits, or
            fewer steps at the same number of commits. They have weight 0.
        donor: The member that sends its state to those behind.
        commits: Number of committed rounds in the donor's state.
        tokens: Tokens since the last round of the members that are not behind.
    """

    number: int
    group: int
    members: tuple[int, ...]
    behind: tuple[int, ...]
    donor: int
    commits: int
    tokens: int


class Membership:
    """The part of a worker in the rounds of an elastic run.

    Use it as a context manager: in the block, a daemon thread writes a heartbeat. Each round calls
    :meth:`agree`, :meth:`connect` and :meth:`commit`.

    A round begins with the living workers that have asked for it. They must be at least ``least``,
    and more than half of the workers with a heartbeat. It begins at once if all workers that lived
    at the end of the round before have asked, or all that have a heartbeat. Otherwise, it waits
    ``wait_s`` for the others.

    The protocol is that of torchft, with three differences. In torchft, the coordinator is a
    server; here it is a worker. In torchft, the workers of a replica group vote about a commit, so
    that one group may commit a sum that another one lacks; here all members or none commit. In
    torchft, a joiner copies the donor, and its first outer gradient is that of the donor again;
    here it has weight 0.

    Attributes:
        commits: Number of committed rounds in this worker's state.
        counted: Number of tokens, or samples, that this worker has computed; the caller adds to it.
            The store gets it with every heartbeat, and before every round.
        rank: This worker's number among the workers that lived at the end of the last round, for
            its share of the data. A worker that was given up by mistake keeps its last one.
        size: The number of these workers.

    Args:
        store: The store. It keeps about 200 bytes of each round.
        worker: Number of this worker, from 0. A worker that replaces another has a new number.
        first_workers: Number of workers that start the run together, with the numbers from 0.
        least: Smallest number of members of a round.
        heartbeat_s: Seconds between two heartbeats.
        dead_after_s: A worker without a heartbeat for this number of seconds is dead.
        wait_s: Longest time in seconds to wait for living workers that have not asked.
        timeout_s: Longest time in seconds of a message between members, and for their reports.

    Raises:
        TypeError: A number has the wrong type.
        ValueError: A number is out of range.

    Example:
        >>> with Membership(dist.HashStore(), worker=0, first_workers=1) as membership:
        ...     round_ = membership.agree(tokens=10)
        ...     group = membership.connect(round_)
        ...     membership.commit(round_, has_sum=True)
        True
        >>> round_.members, round_.tokens
        ((0,), 10)

    References:
        torchft, https://github.com/meta-pytorch/torchft
    """

    def __init__(
        self,
        store: dist.Store,
        worker: int,
        first_workers: int,
        *,
        least: int = 1,
        heartbeat_s: float = 0.1,
        dead_after_s: float = 5.0,
        wait_s: float = 60.0,
        timeout_s: float = 300.0,
    ) -> None:
        self.worker = check_int("worker", worker, least=0)
        self.first_workers = check_int("first_workers", first_workers)
        self.least = check_int("least", least)
        seconds = {"heartbeat_s": heartbeat_s, "wait_s": wait_s, "timeout_s": timeout_s}
        for name, value in seconds.items():
            check_positive(name, value)
        if not dead_after_s > heartbeat_s:
            raise ValueError(
                f"dead_after_s must be more than heartbeat_s, {heartbeat_s}, not {dead_after_s}: "
                "a living worker would count as dead"
            )
        self.heartbeat_s = heartbeat_s
        self.dead_after_s = dead_after_s
        self.wait_s = wait_s
        self.timeout_s = timeout_s
        self.commits = 0
        self.counted = 0
        self.rank, self.size = self.worker % self.first_workers, self.first_workers
        self._store = dist.PrefixStore(_PREFIX, store)
        self._number = 0
        self._workers: dict[int, int] = {}  # by the order in which they came
        # By worker: the last heartbeat, and the time here when it was new.
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._group: Any = None
        self._group_number = -1
        self._end = threading.Event()
        self._heart: threading.Thread | None = None
        self._heart_error: RuntimeError | None = None

    @classmethod
    def from_environment(cls, **settings: float) -> Membership:
        """Return the membership of this worker of ``mlbench run --elastic``.

        Args:
            **settings: ``heartbeat_s``, ``dead_after_s``, ``wait_s`` and ``timeout_s``, all in
                seconds.

        Raises:
            ConfigurationError: This process is not a worker of an elastic run.
            WorkerError: The store does not answer.
        """
        names = (STORE_VARIABLE, WORKER_VARIABLE, FIRST_WORKERS_VARIABLE, LEAST_VARIABLE)
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigurationError(
                f"{missing[0]} must be set, as it is for the workers of an elastic run: start the "
                "script with 'mlbench run NAME K --elastic MIN:MAX SCRIPT'"
            )
        place, *numbers = [os.environ[name] for name in names]
        try:
            host, _, port = place.rpartition(":")
            worker, first_workers, least = map(int, numbers)
            port_number = int(port)
            if not 0 < port_number < 2**16:
                raise ValueError
        except ValueError:
            values = ", ".join(f"{name}={os.environ[name]}" for name in names)
            raise ConfigurationError(
                f"the variables must be an address HOST:PORT and three numbers, not {values}: "
                "leave them as 'mlbench run' sets them"
            ) from None
        with _reaching_the_store():
            store = dist.TCPStore(host, port_number, is_master=False, wait_for_workers=False)
        return cls(store, worker, first_workers, least=least, **settings)

    def __enter__(self) -> Membership:
        with _reaching_the_store():
            mark = secrets.token_hex(8)
            if self._store.compare_set(f"worker/{self.worker}", "", mark) != mark.encode():
                raise ConfigurationError(
                    f"worker must be a number that no worker of this run has had, not "
                    f"{self.worker}: give the replacement of a worker a new one"
                )
            # The heartbeat comes first, because the others read that of every worker in the list.
            self._store.set(f"beat/{self.worker}", "0")
            self._store.set(f"name/{self._store.add('workers', 1)}", str(self.worker))
            if self._store.check(["number"]):
                self._number = int(self._store.get("number"))
            # A worker that was stopped for a while may have set it back.
            while self._store.check([f"outcome/{self._number}"]):
                self._number += 1
            # A separate connection: a request that waits would block the heartbeat.
            beating = self._store.clone()  # type: ignore[attr-defined]
        self._heart = threading.Thread(
            target=self._beat, args=(beating,), name="heartbeat", daemon=True
        )
        self._heart.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        if self._heart is not None:
            self._heart.join()
        # The others need not wait until the heartbeat is old.
        with contextlib.suppress(RuntimeError):
            self._tell_counted(self._store)
            self._store.set(f"beat/{self.worker}", "")
        self.disconnect()

    def has_begun(self) -> bool:
        """Return True if a round of the run has ended, with or without a commit.

        The shared state may then be another than the first one.

        Raises:
            WorkerError: The store does not answer.
        """
        with _reaching_the_store():
            return bool(self._store.check(["number"]))

    def finish(self) -> None:
        """End the run after its last round, so that no worker waits for another one.

        Raises:
            WorkerError: The store does not answer.
        """
        with _reaching_the_store():
            self._store.set("finished", "1")

    def agree(self, tokens: int = 0, steps: int = 0) -> Round:
        """Ask for the next round, and wait until it begins with this worker.

        Args:
            tokens: Number of tokens, or samples, of this worker since the last round.
            steps: Number of steps in this worker's state, if they say which part of the weights the
                round is about. A worker that missed a round without a commit has fewer than others.

        Raises:
            WorkerError: A worker has called :meth:`finish`, or the store does not answer.
        """
        with _reaching_the_store():
            while True:
                round_ = self._ask(tokens, steps)
                if self.worker in round_.members:
                    return round_
                self._await_outcome(round_)

    def connect(self, round_: Round) -> Any:
        """Return the process group of a round's members.

        Raises:
            RuntimeError: A member does not answer.
        """
        if self._group is None or self._group_number != round_.group:
            self.disconnect()
            store = dist.PrefixStore(f"group/{round_.group}", self._store)
            # Not timeout_s: a dead member must not cost the time of a long message. Gloo waits five
            # times as long for a connection.
            limit = datetime.timedelta(seconds=min(self.timeout_s, self.dead_after_s))
            rank = round_.members.index(self.worker)
            self._group = dist.ProcessGroupGloo(store, rank, len(round_.members), limit)
            self._group_number = round_.group
        return self._group

    def disconnect(self) -> None:
        """Close the process group, so that a member that waits for this worker gets an error."""
        self._group = None

    def commit(self, round_: Round, has_sum: bool) -> bool:
        """Report the result of a round, and wait for its outcome.

        Args:
            round_: The round.
            has_sum: True if this worker has the sum of all members, and was healed if it was
                behind.

        Returns:
            True if all members have the sum, the same on all of them.

        Raises:
            WorkerError: The store does not answer.
        """
        if not has_sum:
            self.disconnect()
        with _reaching_the_store():
            self._store.set(f"report/{self.worker}", json.dumps([round_.number, has_sum]))
            committed = self._await_outcome(round_)
        if committed:
            self.commits = round_.commits + 1
        return committed

    def _ask(self, tokens: int, steps: int) -> Round:
        """Ask for the next round, and return the agreement, perhaps without this worker."""
        number, began_s = self._number, time.monotonic()
        # Before the round: what it commits was counted.
        self._tell_counted(self._store)
        self._store.set(f"ask/{self.worker}", json.dumps([number, self.commits, steps, tokens]))
        while True:
            agreement = self._read(f"agreement/{number}")
            if agreement is not None:
                # JSON has no tuples.
                for key in ("members", "behind"):
                    agreement[key] = tuple(agreement[key])
                return Round(number, **agreement)
            living = self._living()
            asks: dict[int, list[int]] = {}
            for worker in living:
                # The request of an earlier round stays in the store until the worker asks again.
                asked, *ask = self._read(f"ask/{worker}") or [None]
                if asked == number:
                    asks[worker] = ask
            # Before a new round begins: a worker that started too late would train alone.
            if self._store.check(["finished"]):
                raise WorkerError(
                    f"the run ended with round {number - 1}, without worker {self.worker}: it "
                    "started too late, or it was stopped for a while"
                )
            is_coordinator = min(asks, default=None) == self.worker
            if is_coordinator and self._is_quorum(asks, living, time.monotonic() - began_s):
                self._write_once(f"agreement/{number}", self._plan(asks))
                continue
            self._pause()

    def _is_quorum(self, asks: Collection[int], living: Collection[int], waited_s: float) -> bool:
        if len(asks) < self.least or 2 * len(asks) <= len(living):
            return False
        former = set(range(self.first_workers))
        if self._number:
            former = set(self._outcome(self._number - 1)["living"])
        all_former = bool(former) and former.issubset(asks)
        return all_former or len(asks) == len(living) or waited_s > self.wait_s

    def _plan(self, asks: Mapping[int, list[int]]) -> dict[str, Any]:
        """Return the agreement of the workers that have asked."""
        commits, steps = max((own, count) for own, count, _ in asks.values())
        members, behind, tokens = sorted(asks), [], 0
        for worker in members:
            own, count, counted = asks[worker]
            if (own, count) < (commits, steps):
                # It receives the donor's state, so its own steps are lost, and their tokens do not
                # count.
                behind.append(worker)
            else:
                tokens += counted
        # Connections take time, so a group goes on with the same members. After a round that was
        # not committed, one of them may have lost its connections.
        group = self._number
        if self._number and self._outcome(self._number - 1)["committed"]:
            before = self._read(f"agreement/{self._number - 1}")
            if before["members"] == members:
                group = before["group"]
        donor = next(worker for worker in members if worker not in behind)
        return {
            "group": group, "members": members, "behind": behind, "donor": donor,
            "commits": commits, "tokens": tokens,
        }  # fmt: skip

    def _await_outcome(self, round_: Round) -> bool:
        """Return the outcome of a round, and write it if this worker is the coordinator."""
        number, has_failed = round_.number, False
        deadline_s = time.monotonic() + self.timeout_s
        while not self._store.check([f"outcome/{number}"]):
            living = [worker for worker in self._living() if worker in round_.members]
            # Only the coordinator, the living member with the lowest number, writes the outcome. If
            # no member lives, a worker that waits for the next round ends this one.
            if living and living[0] != self.worker:
                self._pause()
                continue
            reports = {}
            for worker in round_.members:
                reported, has_sum = self._read(f"report/{worker}") or (None, False)
                if reported == number:
                    reports[worker] = has_sum
            missing = set(living) - reports.keys()
            if not has_failed and not all(reports.values()):
                has_failed = True
                # The round is lost. Only the heartbeats of the dead have to get old, so that their
                # share of the data goes to the others.
                deadline_s = min(deadline_s, time.monotonic() + 2 * self.dead_after_s)
            has_all = len(reports) == len(round_.members) and all(reports.values())
            committed = bool(living) and has_all
            if committed or not missing or time.monotonic() > deadline_s:
                verdict = {"committed": committed, "living": living}
                self._write_once(f"outcome/{number}", verdict)
                # A joining worker reads this number to find the current round.
                self._store.set("number", str(number + 1))
            else:
                self._pause()
        outcome = self._outcome(number)
        self._number = number + 1
        if self.worker in outcome["living"]:
            self.rank = outcome["living"].index(self.worker)
            self.size = len(outcome["living"])
        return bool(outcome["committed"])

    def _outcome(self, number: int) -> dict[str, Any]:
        outcome: dict[str, Any] = self._read(f"outcome/{number}")
        return outcome

    def _living(self) -> list[int]:
        """Return the workers with a heartbeat, ascending, and this one.

        The clocks of two machines differ. So a worker is alive if its heartbeat has changed within
        ``dead_after_s`` of the clock here.
        """
        for position in range(1, int(self._store.get("workers")) + 1):
            # A worker may die before it has written its name, or write it late.
            if position not in self._workers:
                name = self._read(f"name/{position}")
                if name is not None:
                    self._workers[position] = name
        now = time.monotonic()
        living = {self.worker}
        for worker in self._workers.values():
            beat = self._store.get(f"beat/{worker}")
            before, since_s = self._beats.get(worker, (b"", now))
            if beat != before:
                since_s = now
            self._beats[worker] = beat, since_s
            # A worker that has left the run has written an empty heartbeat.
            if beat and now - since_s <= self.dead_after_s:
                living.add(worker)
        return sorted(living)

    def _read(self, key: str) -> Any:
        return _read(self._store, key)

    def _write_once(self, key: str, value: Mapping[str, Any]) -> None:
        """Write a value that all workers obey, unless another one was there first."""
        self._store.compare_set(key, "", json.dumps(value))

    def _pause(self) -> None:
        if self._heart_error is not None:
            # The others take this worker for dead.
            raise self._heart_error
        time.sleep(min(self.heartbeat_s, _LONGEST_PAUSE_S))

    def _beat(self, store: dist.Store) -> None:
        """Write heartbeats until the end."""
        count = 0
        try:
            while not self._end.wait(self.heartbeat_s):
                count += 1
                store.set(f"beat/{self.worker}", str(count))
                self._tell_counted(store)
        except RuntimeError as error:
            self._heart_error = error

    def _tell_counted(self, store: dist.Store) -> None:
        store.set(f"counted/{self.worker}", str(self.counted))


class Rounds:
    """The rounds of an elastic run, for the process that holds its store.

    Attributes:
        commits: Number of committed rounds that :meth:`update` has read.
        members: The workers that were a member of one of them. Only they have the shared state.
        restarted: True if a later round was committed without any of them, from the first state.
        useful: Number of tokens, or samples, in the committed rounds.

    Args:
        store: The store.

    Example:
        >>> store = dist.HashStore()
        >>> rounds = Rounds(store)
        >>> with Membership(store, worker=0, first_workers=1) as membership:
        ...     round_ = membership.agree()
        ...     group = membership.connect(round_)
        ...     _ = membership.commit(round_, has_sum=True)
        >>> rounds.update(), rounds.commits
        ({0: 0}, 1)
    """

    def __init__(self, store: dist.Store) -> None:
        self.commits = 0
        self.members: set[int] = set()
        self.restarted = False
        self.useful = 0
        self._store = dist.PrefixStore(_PREFIX, store)
        self._number = 0

    def update(self) -> dict[int, int]:
        """Read the rounds that have ended since the last call.

        Returns:
            For each new member, the number of rounds that were committed before its first one.
        """
        joined: dict[int, int] = {}
        while outcome := _read(self._store, f"outcome/{self._number}"):
            if outcome["committed"]:
                agreement = _read(self._store, f"agreement/{self._number}")
                if self.members and agreement["donor"] not in self.members:
                    self.restarted = True
                for worker in set(agreement["members"]) - self.members:
                    joined[worker] = agreement["commits"]
                self.members.update(agreement["members"])
                self.commits = agreement["commits"] + 1
                self.useful += agreement["tokens"]
            self._number += 1
        return joined

    def pending(self) -> set[int]:
        """Return the members of the round that has begun and not ended; empty between two rounds.

        It may still be committed, even if some of them have died.
        """
        agreement = _read(self._store, f"agreement/{self._number}")
        if agreement is None:
            return set()
        return set(agreement["members"])

    def samples(self) -> PaidSamples | None:
        """Return the samples of the rounds that :meth:`update` has read, and those of all workers.

        The count of a worker that died is that of its last heartbeat.

        Returns:
            The numbers; None if no worker has counted.
        """
        paid = 0
        count = 0
        # Without the check, get() would wait for the first worker.
        if self._store.check(["workers"]):
            count = int(self._store.get("workers"))
        for position in range(1, count + 1):
            worker = _read(self._store, f"name/{position}")
            paid += _read(self._store, f"counted/{worker}") or 0
        if paid == 0:
            return None
        return PaidSamples(self.useful, paid)

    def finish(self) -> None:
        """End the run, as :meth:`Membership.finish` does."""
        self._store.set("finished", "1")

    @property
    def is_finished(self) -> bool:
        """Return True if a worker or :meth:`finish` has ended the run."""
        return bool(self._store.check(["finished"]))


def _read(store: dist.Store, key: str) -> Any:
    """Return a value, None if it does not exist; torch's ``get`` alone would wait for it."""
    if not store.check([key]):
        return None
    return json.loads(store.get(key))


@contextlib.contextmanager
def _reaching_the_store() -> Iterator[None]:
    """Turn an error of the store into one that names it."""
    try:
        yield
    except WorkerError:
        raise
    except RuntimeError as error:
        raise WorkerError(
            f"the store in which the workers of the run meet does not answer ({error}): was the "
            "process that holds it ended?"
        ) from error
