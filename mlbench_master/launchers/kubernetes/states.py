"""Read the state of a run on Kubernetes from its Job and its pods. All functions are pure."""

from __future__ import annotations

import calendar
import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlbench_master.launchers.interface import JobStatus
from mlbench_master.launchers.kubernetes.manifests import CONTAINER, RANK_ANNOTATION
from mlbench_master.launchers.supervisor.supervise import describe_exit

__all__ = [
    "Trouble",
    "end_of",
    "ended_status",
    "find_trouble",
    "has_log",
    "has_started",
    "is_on_lost_node",
    "rank_of",
    "waiting_reason",
]

_SHELL_SIGNAL = 128
_TERMINATED = _SHELL_SIGNAL + 15
_LONGEST_MESSAGE = 300
# Reasons of the condition DisruptionTarget.
_DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "DeletionByTaintManager": "was ended, because its node {node} failed or was tainted",
    "EvictionByEvictionAPI": "was evicted, as when node {node} is drained",
    "DeletionByPodGC": "was lost with its node {node}",
    "TerminationByKubelet": "was ended by its node {node}",
}


@dataclass(frozen=True)
class Trouble:
    """The end of a pod that is not a success.

    Attributes:
        time_s: Its time in seconds since 1970; the end of the worker, or the request to delete the
            pod.
        weight: 0 for a cause, more for what is rather an effect of another pod's end.
        rank: Rank of the worker.
        reason: One line.
        returncode: Exit status of the worker, negative for a signal; None if it has none.
        has_error: True if its log may have the error.
    """

    time_s: float
    weight: int
    rank: int
    reason: str
    returncode: int | None = None
    has_error: bool = False


def rank_of(pod: Mapping[str, Any]) -> int | None:
    """Return the rank of a pod's worker."""
    text = _dict(_dict(pod, "metadata"), "annotations").get(RANK_ANNOTATION, "")
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else None


def has_started(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod's worker runs or has ended."""
    return bool(_state(pod).keys() & {"running", "terminated"})


def has_log(pod: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a pod has a log that can be read, and whether the log is complete."""
    # A question to a node that does not answer would keep a reader from other pods for most of a
    # minute.
    return has_started(pod) and not is_on_lost_node(pod), "terminated" in _state(pod)


def is_on_lost_node(pod: Mapping[str, Any]) -> bool:
    """Return whether the node of a pod does not answer, so that nobody can end the pod.

    The node controller then calls the pod unready and leaves the other conditions as they are,
    while the kubelet of a node that answers never calls a pod unready whose containers are ready.
    """
    status = _dict(pod, "status")
    ready = {
        condition.get("type"): condition.get("status")
        for condition in status.get("conditions") or ()
    }
    is_unready = ready.get("Ready") == "False" and ready.get("ContainersReady") == "True"
    return status.get("reason") == "NodeLost" or (
        is_unready and not _dict(pod, "spec").get("readinessGates")
    )


def end_of(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the condition with which a Job has ended; None if it continues.

    Since Kubernetes 1.31, a Job is ``Failed`` only when its last pod has ended, which a pod of a
    lost node never does. Until then it has the condition ``FailureTarget``, which counts here if
    nothing else runs.
    """
    found = {
        condition.get("type"): dict(condition)
        for condition in _dict(job, "status").get("conditions") or ()
        if condition.get("status") == "True"
    }
    target = found.get("FailureTarget")
    if target is not None and not all(_has_ended(pod) or is_on_lost_node(pod) for pod in pods):
        target = None
    return found.get("Complete") or found.get("Failed") or target


def waiting_reason(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str:
    """Return why a run waits; empty if all its workers have started."""
    name = _dict(job, "metadata").get("name", "")
    num_workers = _dict(job, "spec").get("completions") or 1
    if _dict(job, "spec").get("suspend"):
        return f"Job {name} is suspended, but not by MLBench"
    by_rank = {rank: pod for pod in pods if (rank := rank_of(pod)) is not None}
    waiting = [
        rank for rank in range(num_workers) if rank not in by_rank or not has_started(by_rank[rank])
    ]
    if not waiting:
        return ""
    reasons = [_why_pod_waits(rank, by_rank[rank]) for rank in waiting if rank in by_rank]
    # A worker that cannot start says more than one that is about to.
    reasons.sort(key=lambda reason: reason[0])
    if reasons:
        return reasons[0][1]
    return (
        f"Job {name} has no pod of worker {waiting[0]} yet; if this remains, see kubectl "
        f"describe job {name}"
    )


def _why_pod_waits(rank: int, pod: Mapping[str, Any]) -> tuple[int, str]:
    """Return why a pod waits, after a number that is 0 for a problem."""
    for condition in _dict(pod, "status").get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            # "SchedulingGated" is another reason.
            return (
                0,
                f"worker {rank} waits for a node ({condition.get('reason')}): {_said(condition)}",
            )
    waiting = _dict(_state(pod), "waiting")
    reason = waiting.get("reason", "")
    if reason in ("", "ContainerCreating", "PodInitializing"):
        return 1, f"worker {rank} is about to start on node {_node(pod)}"
    return 0, f"worker {rank} cannot start ({reason}): {_said(waiting)}"


def find_trouble(pod: Mapping[str, Any]) -> Trouble | None:
    """Return how a pod failed or is being ended; None if it has not failed."""
    rank = rank_of(pod)
    if rank is None:
        return None
    status, node = _dict(pod, "status"), _node(pod)
    ended = _dict(_state(pod), "terminated")
    when = _seconds(ended.get("finishedAt")) or _deleted_at(pod)
    code = _exit_code(ended)
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            when = _seconds(condition.get("lastTransitionTime")) or when
            text = _DISRUPTIONS.get(
                condition.get("reason", ""), f"was disrupted ({condition.get('reason')})"
            )
            return Trouble(when, 0, rank, _line(rank, text.format(node=node), condition), code)
    if status.get("reason") == "Evicted":
        return Trouble(when, 0, rank, _line(rank, f"was evicted from node {node}", status), code)
    if status.get("reason") in ("NodeLost", "NodeShutdown", "Shutdown") or ended.get("reason") == (
        "ContainerStatusUnknown"
    ):
        return Trouble(when, 0, rank, _line(rank, f"was lost with its node {node}", status), code)
    if code:
        return _failed_container(rank, code, when, ended)
    if code is None and status.get("phase") == "Failed":
        reason = status.get("reason") or "unknown reason"
        return Trouble(when, 0, rank, _line(rank, f"failed on node {node} ({reason})", status))
    if code is None and _deleted_at(pod):
        return Trouble(when, 2, rank, f"the pod of worker {rank} was deleted, but not by MLBench")
    return None


def _failed_container(rank: int, code: int, when: float, ended: Mapping[str, Any]) -> Trouble:
    if ended.get("reason") == "OOMKilled":
        text = (
            "used more memory than it had (OOMKilled): give a larger --memory in the engine options"
        )
        return Trouble(when, 0, rank, f"worker {rank} {text}", code)
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return Trouble(when, 0, rank, _line(rank, f"cannot start ({ended['reason']})", ended), code)
    weight = 1 if code == _SHELL_SIGNAL - _TERMINATED else 0
    return Trouble(when, weight, rank, describe_exit(rank, code), code, code > 0)


def ended_status(
    name: str, end: Mapping[str, Any], troubles: Iterable[Trouble]
) -> tuple[JobStatus, Trouble | None]:
    """Return the status of a Job that has ended, and the trouble that ended it, if it was one.

    Args:
        name: The Job's name.
        end: The condition with which it ended.
        troubles: All ends of pods that were seen.
    """
    # The times have whole seconds.
    ordered = sorted(troubles, key=lambda trouble: (trouble.time_s, trouble.weight, trouble.rank))
    finished_at = _seconds(end.get("lastTransitionTime")) or None
    if end.get("type") == "Complete":
        return JobStatus("finished", returncode=0, finished_at=finished_at), None
    if end.get("reason") == "DeadlineExceeded":
        reason = f"Job {name} reached its time limit: give a longer --time in the engine options"
        return JobStatus("failed", reason, None, finished_at), None
    if not ordered:
        reason = (
            f"Job {name} failed ({end.get('reason')}): {_said(end)}; a pod was deleted, "
            "or its node failed"
        )
        return JobStatus("failed", reason, None, finished_at), None
    first = ordered[0]
    return JobStatus("failed", first.reason, first.returncode, finished_at), first


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return _dict(pod, "status").get("phase") in ("Succeeded", "Failed")


def _exit_code(ended: Mapping[str, Any]) -> int | None:
    """Return the exit status of a container, negative for a signal."""
    code = ended.get("exitCode")
    if not isinstance(code, int):
        return None
    return _SHELL_SIGNAL - code if _SHELL_SIGNAL < code < 2 * _SHELL_SIGNAL else code


def _state(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the worker's container."""
    for container in _dict(pod, "status").get("containerStatuses") or ():
        if container.get("name") == CONTAINER:
            return _dict(container, "state")
    return {}


def _deleted_at(pod: Mapping[str, Any]) -> float:
    """Return the time of the request to delete a pod; 0 without one."""
    metadata = _dict(pod, "metadata")
    end_s = _seconds(metadata.get("deletionTimestamp"))
    return end_s - (metadata.get("deletionGracePeriodSeconds") or 0) if end_s else 0.0


def _node(pod: Mapping[str, Any]) -> str:
    return str(_dict(pod, "spec").get("nodeName") or "unknown")


def _line(rank: int, text: str, source: Mapping[str, Any]) -> str:
    said = _said(source)
    return f"worker {rank} {text}{': ' + said if said else ''}"


def _said(source: Mapping[str, Any]) -> str:
    return " ".join(str(source.get("message") or "").split())[:_LONGEST_MESSAGE]


def _dict(source: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = source.get(key)
    return value if isinstance(value, dict) else {}


def _seconds(text: Any) -> float:
    """Return a time of the API in seconds since 1970; 0 if there is none."""
    with contextlib.suppress(ValueError, TypeError):
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    return 0.0
