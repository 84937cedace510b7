"""Pydantic models of the requests that the API accepts; every limit is defined here.

Bodies are JSON or a form, so numbers and truth values may be text.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import unicodedata
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from mlbench_core.calling_environment import check_variable, is_carried
from mlbench_core.network.named_networks import get_network
from mlbench_core.run_terms import WorkerRange
from mlbench_core.tasks import is_run_name
from mlbench_master.database.store import RUN_COLUMNS
from mlbench_master.dates import Date
from mlbench_master.engines.interface import LogFilter

__all__ = [
    "DEFAULT_BANDWIDTH",
    "MAX_BATCH",
    "MAX_ID",
    "MAX_LINES",
    "MAX_POINTS",
    "CurvesQuery",
    "LogsQuery",
    "MetricIn",
    "MetricQuery",
    "PodsQuery",
    "RunChange",
    "RunImport",
    "RunIn",
    "RunsQuery",
    "State",
    "describe_error",
    "describe_errors",
]

# A client sends at most this number in one request; see mlbench_core.client.metric_delivery.
MAX_BATCH = 10_000
# Databases store ids as signed integers of 64 bits.
MAX_ID = 2**63 - 1
MAX_LINES = 5000
# A screen has fewer columns of pixels.
MAX_POINTS = 2000
_MAX_CURVES = 100
_MAX_VARIABLES = 1000
# Linux refuses longer ones.
_MAX_VARIABLE = 131_072
DEFAULT_BANDWIDTH = 1000.0
_POD_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_RANK = re.compile(r"master|[0-9]{1,9}")
# Fields of which an empty text is a value.
_MAY_BE_EMPTY = ("value", "metadata", "tags", "note")
# Control characters, and those that nobody sees: marks that turn the direction of the text,
# separators of lines, and characters without width. A name with them looks like another one.
_UNSEEN = ("Cc", "Cf", "Zl", "Zp")
# The dashboard of version 3.0 sends them with every request: the token of its forms, the number of
# jQuery against caches, and the format of the answer, which is JSON in any case. The type of a
# metric changes nothing elsewhere.
_OF_VERSION_3 = ("csrfmiddlewaretoken", "_", "format", "metric_type")


def _plain_text(text: str) -> str:
    """Refuse text that a database cannot keep: NUL and halves of surrogate pairs."""
    if "\x00" in text:
        raise ValueError("must not contain a NUL character")
    # JSON can escape half of a surrogate pair, which neither SQLite nor PostgreSQL stores.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode text, without half of a surrogate pair") from None
    return text


def _one_line(text: str) -> str:
    if not text.isprintable():
        for character in text:
            if unicodedata.category(character) in _UNSEEN:
                raise ValueError(
                    "must not contain control characters or invisible ones, "
                    f"such as U+{ord(character):04X}"
                )
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _dns_label(text: str) -> str:
    if not is_run_name(text):
        raise ValueError(
            "must be a DNS label: 1 to 63 of a-z, 0-9 and '-', "
            "not starting or ending with '-' (for example my-run-2)"
        )
    return text


def _pod_name(text: str) -> str:
    if not _POD_NAME.fullmatch(text):
        raise ValueError("must be a pod's name: 1 to 253 of a-z, 0-9, '-' and '.'")
    return text


def _rank(text: str) -> int | str:
    if not _RANK.fullmatch(text):
        raise ValueError("must be the rank of a worker such as 0, or 'master'")
    return text if text == "master" else int(text)


def _number_to_text(value: object) -> object:
    """Convert a number to text, which also keeps the ``nan`` and ``inf`` of a diverging run."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    return value


def _json_to_text(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, (dict, list, int, float)):
        return json.dumps(value)
    return value


def _split(value: object) -> object:
    """Split arguments that are one text, as a shell would; a list stays as it is."""
    if isinstance(value, str):
        return shlex.split(value)
    return value


def _split_tags(value: object) -> object:
    if isinstance(value, str):
        return list(filter(None, map(str.strip, value.split(","))))
    return value


def _tag(text: str) -> str:
    if "," in text:
        raise ValueError("must not contain a comma, which separates tags")
    return text.strip()


def _each_once(tags: list[str]) -> list[str]:
    return list(dict.fromkeys(tags))


def _command(text: str) -> str:
    try:
        if not shlex.split(text):
            raise ValueError("it is empty")
    except ValueError as error:
        raise ValueError(f"must be a command line that a shell can split: {error}") from None
    return text


State = Literal["initialized", "started", "finished", "failed"]
_DESCENDING = tuple(f"-{column}" for column in RUN_COLUMNS)
# Not a pattern: the API reference would look for objects with the names in it.
Order = Literal[(*RUN_COLUMNS, *_DESCENDING)]  # type: ignore[valid-type]
# The type of the input in the description of the API.
_TEXT_OR_NUMBER: Any = str | float | bool
Text = Annotated[str, AfterValidator(_plain_text)]
Line = Annotated[Text, AfterValidator(_one_line)]
RunName = Annotated[
    Text,
    AfterValidator(_dns_label),
    Field(json_schema_extra={"pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", "maxLength": 63}),
]
Tags = Annotated[
    list[Annotated[Line, Field(max_length=64), AfterValidator(_tag)]],
    BeforeValidator(_split_tags, list[str] | str),
    Field(max_length=20),
    AfterValidator(_each_once),
]
Identifier = Annotated[int, Field(ge=1, le=MAX_ID)]
Command = Annotated[Line, Field(max_length=16_384), AfterValidator(_command)]


class _Body(BaseModel):
    """A body or a query: its empty form fields count as left out, and unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", str_max_length=262_144)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be an object with named fields")
        fields = {}
        for name, value in data.items():
            # HTML forms send the fields that the user left empty.
            is_empty = value is None or (value == "" and name not in _MAY_BE_EMPTY)
            is_ignored = name in _OF_VERSION_3 and name not in cls.model_fields
            if not is_empty and not is_ignored:
                fields[name] = value
        return fields


def _network(text: str) -> str:
    """Return the text of a network, which has a name or a text."""
    # Do not reveal server paths: a client must not learn which files the master's machine has.
    if text.strip().endswith(".toml"):
        raise ValueError(
            f"must be a name or a text such as '100mbit,20ms', not the file {text[:80]!r}"
        )
    if not text.strip():
        return ""
    return str(get_network(text))


def _elastic(text: str) -> str:
    """Return the text of a range of workers, or an empty text."""
    return str(WorkerRange.parse(text)) if text.strip() else ""


class MetricIn(_Body):
    """One value of one metric of a run or of a pod.

    Attributes:
        run_id: The run of the metric; give this or ``pod_name``.
        pod_name: The pod of the metric.
        name: For example ``"train_loss @ 0"``.
        date: Time of the measurement; now if left out.
        value: The value as text or number; it is kept as text.
        cumulative: True if it grows over time, like a counter.
        metadata: Any text or JSON, returned unchanged.
        id: An id from the client. A repeated delivery of the same id for the same run or pod is
            stored once.
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["run_id"]}, {"required": ["pod_name"]}]}
    )

    run_id: Identifier | None = None
    pod_name: Annotated[Text, AfterValidator(_pod_name)] | None = None
    name: Annotated[Line, Field(max_length=255)]
    date: Date | None = None
    value: Annotated[
        Text, BeforeValidator(_number_to_text, _TEXT_OR_NUMBER), Field(max_length=65_536)
    ]
    cumulative: bool = False
    metadata: Annotated[Text, BeforeValidator(_json_to_text, Any), Field(max_length=65_536)] = ""
    id: (
        Annotated[Line, BeforeValidator(_number_to_text, _TEXT_OR_NUMBER), Field(max_length=128)]
        | None
    ) = None

    @model_validator(mode="after")
    def _one_owner(self) -> MetricIn:
        if (self.run_id is None) == (self.pod_name is None):
            raise ValueError("run_id, pod_name: give exactly one of them")
        return self


def _folder(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path, for example /home/me/project")
    return text


def _carried(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not is_carried(name):
            raise ValueError(
                f"must have only variables that a run takes from its call, not {name[:80]!r}"
            )
    return variables


VariableName = Annotated[Text, AfterValidator(check_variable), Field(max_length=256)]
Variables = Annotated[
    dict[VariableName, Annotated[Text, Field(max_length=_MAX_VARIABLE)]],
    Field(max_length=_MAX_VARIABLES),
]
Folder = Annotated[Line, AfterValidator(_folder), Field(max_length=4096)]


class Caller(_Body):
    """The place from which a run is started.

    Attributes:
        cwd: The current folder, in which workers start if the run names no other one.
        environment: The variables of :func:`mlbench_core.calling_environment.is_carried`. They
            replace those of the master.
    """

    cwd: Folder
    environment: Annotated[Variables, AfterValidator(_carried)] = {}


class RunIn(_Body):
    """A run to start.

    Attributes:
        name: A DNS label, not in use.
        num_workers: Number of worker processes.
        num_cpus: Cores of each worker.
        max_bandwidth: Mbit/s of each worker. Less than the default is refused if the engine
            cannot limit it.
        task: Key of a task (``"1a"``); give this, ``image_name`` or ``command``.
        arguments: Further arguments of the task's script.
        command: A worker's command line.
        image_name: A task's image, or ``"custom_image"`` together with the next two fields.
        custom_image_name: Name of the image; refused if no container would use it. Left out, or
            ``"custom_image"``, the command runs on the machine of the master.
        custom_image_command: A worker's command line in it.
        backend: ``gloo``, ``nccl``, ``mpi``, or ``"custom_backend"`` together with the next two
            fields.
        custom_backend: Name of a custom backend.
        run_all_nodes: True if every worker runs the command. With False and a custom backend, only
            the first one does, and starts the others itself.
        gpu_enabled: True if the workers use GPUs: the command gets ``--gpu``, and each worker its
            own GPU. More workers than GPUs are refused.
        light_target: True for the light goal of the task: the command gets ``--light``.
        exclusive: True to run it alone: it starts when no other run is running, and no other run
            starts until it ends.
        engine_options: Options of the engine's own command, for example of ``sbatch``; refused if
            it has none.
        network: Name or text of an emulated network in which each worker has its own host, for
            example ``"wan-continent"`` or ``"100mbit,20ms"``; refused if the engine cannot
            emulate it.
        cwd: Absolute path of the folder in which the workers start; by default that of ``caller``,
            and without it a folder of the run. Refused if the workers run in containers.
        environment: Variables of the workers, besides those of ``caller`` or of the master.
        caller: The place from which the run is started, as ``mlbench run`` sends it; ignored if the
            workers run in containers, which have their own folder and environment.
        oversubscribe: True to start more workers than the cores can serve; otherwise, more than
            four on a core are refused.
        elastic: ``MIN:MAX`` for an elastic run: a worker that dies is replaced, the rounds go on
            with at least MIN workers, and at most MAX live at the same time. Refused for a task,
            and if the engine cannot replace workers.
        tags: Words under which the dashboard shows several runs as one group.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["command"]},
                {"required": ["task"]},
                {"required": ["image_name"]},
            ]
        }
    )

    name: RunName
    num_workers: Annotated[int, Field(ge=1, le=4096)]
    num_cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] = 1.0
    max_bandwidth: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = DEFAULT_BANDWIDTH
    task: Annotated[Line, Field(max_length=128)] | None = None
    arguments: Annotated[
        list[Annotated[Text, Field(max_length=4096)]],
        BeforeValidator(_split, list[str] | str),
        Field(max_length=256),
    ] = []
    command: Command | None = None
    image_name: Annotated[Line, Field(max_length=512)] | None = None
    custom_image_name: Annotated[Line, Field(max_length=512)] | None = None
    custom_image_command: Command | None = None
    backend: Annotated[Line, Field(max_length=64)] = "gloo"
    custom_backend: Annotated[Line, Field(max_length=64)] | None = None
    run_all_nodes: bool = True
    gpu_enabled: bool = False
    light_target: bool = False
    exclusive: bool = False
    engine_options: Annotated[
        list[Annotated[Line, Field(max_length=1024)]],
        BeforeValidator(_split, list[str] | str),
        Field(max_length=64),
    ] = []
    network: Annotated[Line, AfterValidator(_network), Field(max_length=2000)] = ""
    cwd: Folder | None = None
    environment: Variables = {}
    caller: Caller | None = None
    oversubscribe: bool = False
    elastic: Annotated[Line, AfterValidator(_elastic), Field(max_length=64)] = ""
    tags: Tags = []


class RunChange(_Body):
    """The words about a run that people may change at any time; one that is left out stays.

    Attributes:
        tags: Words under which the dashboard shows several runs as one group, as a list or as one
            text with commas.
        note: Any text about the run.
    """

    tags: Tags | None = None
    note: Annotated[Text, Field(max_length=4096)] | None = None


class RunImport(_Body):
    """A run that ended elsewhere, without this master.

    Its metrics follow as those of any other run.

    Attributes:
        fingerprint: SHA-256 that identifies the run, in hexadecimal digits. A run is imported only
            once.
        name: A DNS label. If a run has this name, the new one gets a number at the end.
        state: How it ended.
        created_at: Its start.
        finished_at: Its end.
        reason: The reason of a failure.
        num_workers: Number of worker processes.
        num_cpus: Cores of each worker.
        backend: The backend of its communication.
        command: A worker's command line.
        gpu_enabled: True if the workers used GPUs.
        light_target: True for the light goal of the task.
    """

    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    name: RunName
    state: Literal["finished", "failed"]
    created_at: Date
    finished_at: Date
    reason: Annotated[Text, Field(max_length=4096)] | None = None
    num_workers: Annotated[int, Field(ge=1, le=4096)]
    num_cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] = 1.0
    backend: Annotated[Line, Field(max_length=64)] = "unknown"
    command: Annotated[Text, Field(max_length=16_384)] = ""
    gpu_enabled: bool = False
    light_target: bool = False


class MetricQuery(_Body):
    """The query parameters of ``GET /api/metrics/{id}/``.

    Attributes:
        metric_type: ``"pod"`` if the id is a pod's name, ``"run"`` if it is a run's id.
        since: Oldest date to include.
        summarize: Maximum number of entries of each metric; neighbors are averaged.
        metric_filter: Name of the only metric to include.
        last_n: Number of the latest entries of each metric to include.
        format: ``"json"``, or for a download ``"zip"`` or ``"csv"`` (columns: name, date, rank,
            epoch, value). A text in it that a spreadsheet would calculate begins with an
            apostrophe.
    """

    metric_type: Literal["pod", "run"] = "pod"
    since: Date | None = None
    summarize: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    metric_filter: Annotated[Text, Field(max_length=255)] | None = None
    last_n: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    format: Literal["json", "zip", "csv", "api"] = "json"


class CurvesQuery(_Body):
    """The query parameters of the curves of a run or a pod.

    Attributes:
        metric: Names of the metrics to include; without one, the names and counts of all metrics.
        points: Maximum number of points of each curve; the smallest and the largest values are
            kept.
    """

    metric: Annotated[
        list[Annotated[Text, Field(max_length=255)]], Field(max_length=_MAX_CURVES)
    ] = []
    points: Annotated[int, Field(ge=1, le=MAX_POINTS)] = MAX_POINTS


class LogsQuery(_Body):
    """The query parameters of ``GET /api/runs/{id}/logs/``.

    Attributes:
        rank: Only lines of the worker with this rank, or with ``master`` only lines that no worker
            wrote.
        stream: Only lines of this stream; ``system`` has the lines of the master.
        search: Only lines with this text; upper and lower case are the same.
        since_line: Number of the first line wanted, from 0. Pass the answer's ``next`` to continue,
            until it does not grow.
        before_line: Read backwards from this line, or from the end of the log if it has fewer
            lines: the answer has the last ``limit`` lines before it. Pass the answer's ``previous``
            to continue, until it is ``since_line``.
        limit: Maximum number of lines; with 0 they are only counted.
        format: ``json``, or ``text`` to download all lines as a file, whatever their number.
    """

    rank: (
        Annotated[
            str,
            AfterValidator(_rank),
            Field(json_schema_extra={"pattern": "^(master|[0-9]{1,9})$"}),
        ]
        | None
    ) = None
    stream: Literal["stdout", "stderr", "system"] | None = None
    search: Annotated[Text, Field(max_length=1000)] = ""
    since_line: Annotated[int, Field(ge=0, le=MAX_ID)] = 0
    before_line: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    limit: Annotated[int, Field(ge=0, le=MAX_LINES)] = MAX_LINES
    format: Literal["json", "text"] = "json"

    @property
    def wanted(self) -> LogFilter:
        """Return the filter of these parameters."""
        return LogFilter(self.rank, self.stream, self.search)


class RunsQuery(_Body):
    """The query parameters of ``GET /api/runs/``.

    Attributes:
        state: Only runs in one of these states; ``failed`` includes runs that a user stopped.
        name: Only runs with this text in their name; upper and lower case are the same.
        sort: The order, with ``-`` for the largest value first. Runs without a value come last, and
            those with equal values are ordered by id.
        limit: Maximum number of runs; by default all. The header ``Link`` has the address of the
            next ones.
        after: Only runs with a larger id.
        offset: Number of first runs to leave out.
    """

    state: Annotated[list[State], Field(max_length=len(get_args(State)))] = []
    name: Annotated[Text, Field(max_length=255)] = ""
    sort: Order = "id"  # type: ignore[valid-type]
    limit: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    after: Annotated[int, Field(ge=0, le=MAX_ID)] = 0
    offset: Annotated[int, Field(ge=0, le=MAX_ID)] = 0


class PodsQuery(_Body):
    """The query parameters of ``GET /api/pods/``.

    Attributes:
        limit: Maximum number of workers; by default all. The header ``Link`` has the address of the
            next ones.
        after: Only workers after this one, in the order of runs and ranks: the id of its run, a
            ``-`` and its rank.
    """

    limit: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    after: Annotated[str, Field(pattern="^[0-9]{1,18}-[0-9]{1,9}$")] = "0-0"


def describe_errors(error: ValidationError) -> list[tuple[str, str]]:
    """Return the name of each wrong field, and a description with its value and the allowed values.

    Args:
        error: The error of pydantic.

    Returns:
        For example ``[("num_workers", "Input should be greater than or equal to 1 (got 0)")]``; the
        first five. The name is empty for an error of the whole body.
    """
    parts = []
    # A wrong body can have thousands of errors; the first five are enough to correct it.
    for item in error.errors(include_url=False, include_context=False)[:5]:
        field = ".".join(map(str, item["loc"]))
        message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if item["type"] == "missing":
            message = "is required"
        elif item["type"] == "extra_forbidden":
            message = _unknown(str(item["loc"][-1]), error.title)
        elif field:
            message = f"{message} (got {_short(item['input'])})"
        parts.append((field, message))
    return parts


def _unknown(field: str, model: str) -> str:
    """Describe the error of a field that a model does not have."""
    models = {body.__name__: body for body in _Body.__subclasses__()}
    fields = list(models[model].model_fields)
    # "image" means "image_name".
    similar = [name for name in fields if name.startswith(f"{field.lower()}_")]
    if not similar:
        similar = difflib.get_close_matches(field.lower(), fields, 1)
    hint = f"the fields are {', '.join(fields)}"
    if similar:
        hint = f"did you mean {similar[0]!r}?"
    return f"is not a field, and would be ignored: {hint}"


def describe_error(error: ValidationError, prefix: str = "") -> str:
    """Describe an error in one line that names each wrong field, its value and the allowed values.

    Args:
        error: The error of pydantic.
        prefix: Text before each field's name, for example ``"[3]."``.

    Returns:
        For example ``"num_workers: Input should be greater than or equal to 1 (got 0)"``.
    """
    parts = []
    for field, message in describe_errors(error):
        if field:
            message = f"{field}: {message}"
        parts.append(f"{prefix}{message}")
    return "; ".join(parts)


def _short(value: object, limit: int = 80) -> str:
    if isinstance(value, (str, bytes)):
        # ascii() of a body of megabytes would take long.
        value = value[:limit]
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."
