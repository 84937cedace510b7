"""Read the options of a run on Kubernetes: the words of ``--engine-options``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["KubernetesOptions", "Toleration", "Volume", "parse_options"]

# ASCII in these patterns: without it, \w and \d match letters and digits that Kubernetes refuses.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# Names of labels and their values: "nvidia.com/gpu.product" and "A100-SXM4".
_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII
)
_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_SIZE = re.compile(r"[1-9]\d{0,8}(\.\d{1,3})?([kMGT]|[KMGT]i)?", re.ASCII)
_TIME = re.compile(r"([1-9]\d{0,6})([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# Folders that the system or MLBench itself mounts or needs. Images may have links between those of
# the system, for example from /var/run to /run and from /bin to /usr/bin, so both ends are here.
_TAKEN = (
    *("/mlbench", "/workspace", "/dev", "/proc", "/sys", "/run", "/var/run", "/etc", "/usr"),
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
)
_FOLDER = re.compile(r"(/[\w.+@-]+)+", re.ASCII)


@dataclass(frozen=True)
class Volume:
    """A volume for data.

    Attributes:
        claim: Name of a PersistentVolumeClaim.
        folder: Folder at which workers find it.
        read_only: True if workers may not write to it.
    """

    claim: str
    folder: str
    read_only: bool = False


@dataclass(frozen=True)
class Toleration:
    """A taint of nodes that workers tolerate.

    Attributes:
        key: The taint's name.
        value: The taint's value; None for any.
        effect: The taint's effect; empty for any.
    """

    key: str
    value: str | None = None
    effect: str = ""


@dataclass(frozen=True)
class KubernetesOptions:
    """The options of a run.

    Attributes:
        memory: Memory of each worker, as a quantity of Kubernetes; empty without a limit.
        shm_size: Size of ``/dev/shm``; empty for the default.
        time_s: Seconds after which Kubernetes ends the run; None without a limit.
        node_selector: Labels of nodes that may run workers, as pairs.
        tolerations: Taints that workers tolerate.
        volumes: Volumes for data.
        image_pull_secrets: Names of Secrets for the registry of images.
        image_pull_policy: When to pull the image; empty for the default of Kubernetes.
        priority_class: Name of a PriorityClass; empty for the default.
    """

    memory: str = ""
    shm_size: str = ""
    time_s: int | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    volumes: tuple[Volume, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: str = ""
    priority_class: str = ""


def parse_options(words: Sequence[str]) -> KubernetesOptions:
    """Read the options of a run.

    Args:
        words: Words of a command line.

    Returns:
        The options.

    Raises:
        ValueError: An option is unknown or has a wrong value; the message names it.

    Example:
        >>> options = parse_options(["--time=2h", "--volume", "images:/data/images:ro"])
        >>> options.time_s, options.volumes[0].folder
        (7200, '/data/images')
    """
    options: dict[str, Any] = vars(_parser().parse_args(list(words)))
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = tuple(value)
    return KubernetesOptions(**options)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions; argparse would end the master."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"engine_options: must be options of the engine kubernetes: {message[:300]}; "
            "see its page"
        )


def _parser() -> _Parser:
    # A suppressed default leaves an option out, so KubernetesOptions has the only defaults.
    parser = _Parser(
        prog="", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    size = _checked(_SIZE, "must be a size such as 4Gi or 500Mi")
    name = _checked(_NAME, "must be the name of an object of Kubernetes")
    parser.add_argument("--memory", type=size)
    parser.add_argument("--shm-size", type=size)
    parser.add_argument("--time", type=_seconds, dest="time_s")
    parser.add_argument("--node-selector", type=_label, action="append")
    parser.add_argument("--toleration", type=_toleration, action="append", dest="tolerations")
    parser.add_argument("--volume", type=_volume, action="append", dest="volumes")
    parser.add_argument(
        "--image-pull-secret", type=name, action="append", dest="image_pull_secrets"
    )
    parser.add_argument("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"))
    parser.add_argument("--priority-class", type=name)
    return parser


def _checked(pattern: re.Pattern[str], allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise argparse.ArgumentTypeError(f"{allowed}, not {text[:80]!r}")
        return text

    return check


def _seconds(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must be a number with s, m, h or d, such as 90m, not {text[:80]!r}"
        )
    return int(match[1]) * _SECONDS[match[2]]


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or _KEY.fullmatch(key) is None or _VALUE.fullmatch(value) is None:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, a label of nodes, not {text[:80]!r}")
    return key, value


def _toleration(text: str) -> Toleration:
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    is_label = _KEY.fullmatch(key) is not None and _VALUE.fullmatch(value) is not None
    if not is_label or (colon and effect not in _EFFECTS):
        raise argparse.ArgumentTypeError(
            f"must be KEY[=VALUE][:EFFECT], where EFFECT is one of {', '.join(_EFFECTS)}, not "
            f"{text[:80]!r}"
        )
    # "KEY" tolerates any value, "KEY=" an empty one.
    return Toleration(key, value if equals else None, effect)


def _volume(text: str) -> Volume:
    claim, _, rest = text.partition(":")
    folder, _, mode = rest.partition(":")
    if claim.startswith("/"):
        raise argparse.ArgumentTypeError(
            f"must be CLAIM:/FOLDER, not {text[:80]!r}: a folder of a node is not a volume here; "
            "make a PersistentVolumeClaim"
        )
    has_names = _NAME.fullmatch(claim) is not None and _FOLDER.fullmatch(folder) is not None
    if not has_names or mode not in ("", "ro", "rw"):
        raise argparse.ArgumentTypeError(
            "must be CLAIM:/FOLDER[:ro], with the name of a PersistentVolumeClaim, not "
            f"{text[:80]!r}"
        )
    # By whole names, because /etcetera is not below /etc. With "..", a folder could reach a taken
    # one although its text begins with another name.
    is_taken = any(f"{folder}/".startswith(f"{taken}/") for taken in _TAKEN)
    # A volume at /var would hide the folders of the system in it.
    hides_one = any(taken.startswith(f"{folder}/") for taken in _TAKEN)
    if is_taken or hides_one or {".", ".."} & set(folder.split("/")):
        raise argparse.ArgumentTypeError(
            f"must have another folder than {folder[:80]!r}: take one below /data"
        )
    return Volume(claim, folder, mode == "ro")
