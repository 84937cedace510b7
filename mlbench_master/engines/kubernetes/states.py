"""Read the state of a run on Kubernetes from its Job and its pods. All functions are pure."""

from __future__ import annotations

import calendar
import contextlib
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from mlbench_master.engines.interface import JobStatus
from mlbench_master.engines.kubernetes.manifests import CONTAINER, RANK_ANNOTATION
from mlbench_master.engines.supervisor.supervise import describe_exit, from_shell_status

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
        weight: 0 for a cause, more for a probable effect of another pod's end.
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
    if isinstance(text, str) and text.isascii() and text.isdecimal():
        return int(text)
    return None


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
    ready = {condition.get("type"): condition.get("status") for condition in _conditions(pod)}
    is_unready = ready.get("Ready") == "False" and ready.get("ContainersReady") == "True"
    # A readiness gate makes a pod unready, too.
    has_gates = bool(_dict(pod, "spec").get("readinessGates"))
    return status.get("reason") == "NodeLost" or (is_unready and not has_gates)


def end_of(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the condition with which a Job has ended; None if it continues.

    Since Kubernetes 1.31, a Job is ``Failed`` only when its last pod has ended, which a pod of a
    lost node never does. Until then it has the condition ``FailureTarget``, which counts here if
    nothing else runs.
    """
    conditions: dict[str, dict[str, Any]] = {}
    for condition in _conditions(job):
        if condition.get("status") == "True":
            conditions[condition.get("type", "")] = dict(condition)
    end = conditions.get("Complete") or conditions.get("Failed")
    if end is not None:
        return end
    target = conditions.get("FailureTarget")
    if target is not None and all(_has_ended(pod) or is_on_lost_node(pod) for pod in pods):
        return target
    return None


def waiting_reason(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str:
    """Return why a run waits; empty if all its workers have started."""
    name, spec = _dict(job, "metadata").get("name", ""), _dict(job, "spec")
    if spec.get("suspend"):
        return f"Job {name} is suspended, but not by MLBench"
    pods_by_rank = {rank_of(pod): pod for pod in pods}
    without_pod: list[int] = []
    reasons: list[tuple[int, str]] = []
    for rank in range(spec.get("completions") or 1):
        pod = pods_by_rank.get(rank)
        if pod is None:
            without_pod.append(rank)
        elif not has_started(pod):
            reasons.append(_why_pod_waits(rank, pod))
    if reasons:
        # A worker that cannot start says more than one that is about to.
        return min(reasons, key=itemgetter(0))[1]
    if without_pod:
        return (
            f"Job {name} has no pod of worker {without_pod[0]} yet; if this remains, see kubectl "
            f"describe job {name}"
        )
    return ""


def _why_pod_waits(rank: int, pod: Mapping[str, Any]) -> tuple[int, str]:
    """Return why a pod waits, after a number that is 0 for a problem."""
    for condition in _conditions(pod):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            # "Unschedulable" or, for example, "SchedulingGated".
            reason = condition.get("reason")
            return 0, f"worker {rank} waits for a node ({reason}): {_message(condition)}"
    waiting = _dict(_state(pod), "waiting")
    reason = waiting.get("reason", "")
    if reason in ("", "ContainerCreating", "PodInitializing"):
        return 1, f"worker {rank} is about to start on node {_node(pod)}"
    return 0, f"worker {rank} cannot start ({reason}): {_message(waiting)}"


def find_trouble(pod: Mapping[str, Any]) -> Trouble | None:
    """Return how a pod failed or is being ended; None if it has not failed."""
    rank = rank_of(pod)
    if rank is None:
        return None
    # A disruption comes before the exit status, which is its effect: the kubelet ends the worker of
    # an evicted pod with a signal.
    status, node = _dict(pod, "status"), _node(pod)
    ended = _dict(_state(pod), "terminated")
    when = _seconds(ended.get("finishedAt")) or _deleted_at(pod)
    code = ended.get("exitCode")
    if isinstance(code, int):
        code = from_shell_status(code)
    else:
        code = None
    for condition in _conditions(pod):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            when = _seconds(condition.get("lastTransitionTime")) or when
            unknown = f"was disrupted ({condition.get('reason')})"
            text = _DISRUPTIONS.get(condition.get("reason", ""), unknown).format(node=node)
            return Trouble(when, 0, rank, _line(rank, text, condition), code)
    reason = status.get("reason")
    if reason == "Evicted":
        return Trouble(when, 0, rank, _line(rank, f"was evicted from node {node}", status), code)
    is_unknown = ended.get("reason") == "ContainerStatusUnknown"
    if is_unknown or reason in ("NodeLost", "NodeShutdown", "Shutdown"):
        return Trouble(when, 0, rank, _line(rank, f"was lost with its node {node}", status), code)
    if code:
        return _failed_container(rank, code, when, ended)
    if code is None and status.get("phase") == "Failed":
        text = f"failed on node {node} ({reason or 'unknown reason'})"
        return Trouble(when, 0, rank, _line(rank, text, status))
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
    weight = 0
    # SIGTERM ends the other pods of a Job that has failed.
    if code == -signal.SIGTERM:
        weight = 1
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
            f"Job {name} failed ({end.get('reason')}): {_message(end)}; a pod was deleted, "
            "or its node failed"
        )
        return JobStatus("failed", reason, None, finished_at), None
    first = ordered[0]
    return JobStatus("failed", first.reason, first.returncode, finished_at), first


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return _dict(pod, "status").get("phase") in ("Succeeded", "Failed")


def _state(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the worker's container."""
    for container in _dict(pod, "status").get("containerStatuses") or ():
        # A cluster may add containers of its own, such as the proxy of a service mesh.
        if container.get("name") == CONTAINER:
            return _dict(container, "state")
    return {}


def _deleted_at(pod: Mapping[str, Any]) -> float:
    """Return the time of the request to delete a pod; 0 without one."""
    metadata = _dict(pod, "metadata")
    end_s = _seconds(metadata.get("deletionTimestamp"))
    if not end_s:
        return 0.0
    # The timestamp is the end of the grace period.
    return end_s - (metadata.get("deletionGracePeriodSeconds") or 0)


def _node(pod: Mapping[str, Any]) -> str:
    return str(_dict(pod, "spec").get("nodeName") or "unknown")


def _line(rank: int, text: str, source: Mapping[str, Any]) -> str:
    message = _message(source)
    if message:
        text = f"{text}: {message}"
    return f"worker {rank} {text}"


def _message(source: Mapping[str, Any]) -> str:
    return " ".join(str(source.get("message") or "").split())[:_LONGEST_MESSAGE]


def _conditions(source: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the conditions of a Job or a pod."""
    return _dict(source, "status").get("conditions") or ()


def _dict(source: Mapping[str, Any], key: str) -> dict[str, Any]:
    # The API leaves out empty fields, and null stands for one as well.
    value = source.get(key)
    if not isinstance(value, dict):
        return {}
    return value


def _seconds(text: Any) -> float:
    """Return a time of the API in seconds since 1970; 0 if there is none."""
    with contextlib.suppress(ValueError, TypeError):
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    return 0.0
