"""``mlbench run``: start runs, watch them, and show their results."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from mlbench_cli import _embedded, _follow, _run_without_master, _wait
from mlbench_cli._client import MasterClient, RunSource, names_of
from mlbench_cli._engine_options import EngineType
from mlbench_cli._networks import NetworkType
from mlbench_cli._output import (
    clean,
    dashboard_option,
    fork_option,
    json_option,
    print_json,
    print_table,
    remark,
)
from mlbench_cli._script import (
    Script,
    find_script,
    missing_script,
    refuse_options,
    script_options,
)
from mlbench_core.calling_environment import (
    FORK_VARIABLE,
    call_folder,
    check_variable,
    describe_call,
)
from mlbench_core.client import settings
from mlbench_core.client.series import (
    FIRST_SEED,
    RunSeries,
    check_backend,
    check_placeholders,
    parse_workers,
)
from mlbench_core.errors import MasterRequestError, MLBenchError
from mlbench_core.network.description import Network
from mlbench_core.run_terms import GoalAim, WorkerRange
from mlbench_core.tasks import BACKENDS, TASKS, Task, get_task, is_run_name, option_value
from mlbench_master.engines.containers import PROGRAMS

__all__ = ["run"]

CUSTOM_IMAGE = "custom_image"
# Words that only a shell understands as the first one of a command.
_SHELL_WORDS = (
    ".", "alias", "cd", "eval", "exec", "export", "for", "if", "pushd", "set", "source", "ulimit",
    "umask", "unset", "while", "(", "{", "!", "&&",
)  # fmt: skip
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.", re.DOTALL)
_OPERATOR = re.compile(r"(?:^|\s)(&&|\|\|?|;|&|\d?>>?(?:&\d)?|<)(?=\s|$)|(?<=\S)(;)(?=\s|$)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# These tasks validate several times per epoch, so the number of validations does not show how many
# epochs are left.
_VALIDATED_OFTEN = ("4a",)


class _TaskType(click.ParamType):
    name = "task"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Task:
        # click may pass a value that is already converted, and requires every type to accept it.
        if isinstance(value, Task):
            return value
        try:
            return get_task(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [
            CompletionItem(key, help=task.title)
            for key, task in TASKS.items()
            if key.startswith(incomplete)
        ]


class _Cores(click.FloatRange):
    """A positive number of cores."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        # Python also reads nan and inf as numbers, which JSON cannot hold.
        if not math.isfinite(number):
            self.fail(f"{value!r} must be a positive number of cores, for example 0.5", param, ctx)
        return number


class _WorkerRangeType(click.ParamType):
    name = "range"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> WorkerRange:
        if isinstance(value, WorkerRange):
            return value
        try:
            return WorkerRange.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _RunCommand(click.Command):
    """A command that keeps a script with all words after it, and the words after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # click would parse the words after "--" as numbers of workers.
        cut = args.index("--") if "--" in args else len(args)
        start = find_script(args[:cut], self)
        script: list[str] = []
        arguments = list(args[cut + 1 :])
        if start is not None:
            # A "--" after the script is one of its own words.
            script, arguments, cut = list(args[start:]), [], start
        # ctx.obj carries the words to run(), because click has no parameter for words that it does
        # not parse.
        ctx.obj = (script, arguments)
        try:
            return super().parse_args(ctx, args[:cut])
        except click.NoSuchOption as error:
            if arguments:
                raise
            place = "its name" if script else "'--'"
            text = (
                f"{error.format_message().rstrip('.')}. Options of the script come after {place}."
            )
            raise click.UsageError(text, error.ctx) from error

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [*pieces, "[SCRIPT.py [ARGUMENTS...] | -- ARGUMENTS...]"]


@dataclass
class _Options:
    """The options of one call under click's names, a script, and the words after ``--``."""

    name: str
    num_workers: tuple[int, ...]
    task: Task | None
    image: str | None
    command: str | None
    observer: list[str]
    backend: str | None
    gpu: bool
    num_cpus: float | None
    light: bool
    repeats: int | None
    seed: int | None
    exclusive: bool
    engine: str | None
    engine_options: str | None
    no_master: bool
    data_dir: Path | None
    container: str | None
    network: Network | None
    cwd: Path | None
    env: tuple[str, ...]
    oversubscribe: bool
    elastic: WorkerRange | None
    fork: bool
    replace: bool
    wait: bool | None
    output: Path | None
    dashboard_url: str | None
    as_json: bool
    script_words: list[str]
    arguments: list[str]

    def complete(self, ctx: click.Context) -> None:
        """Ask for missing values, check all of them, and remember them for the next questions.

        Raises:
            click.UsageError: Values contradict each other, or one is missing and standard input is
                not a terminal.
        """
        if self.task is not None and (self.image or self.command):
            raise click.UsageError(
                "--task cannot be given with --image or --command: a task has its own command"
            )
        self._check_elastic()
        self._check_script_options()
        if self.output is not None and not self.wait:
            raise click.UsageError(
                "--output needs --wait: the results are saved when the runs have ended"
            )
        self._check_engine()
        last = settings.read(settings.LAST_RUN)
        given = (self.task, self.command, self.image, self.script)
        asked = given.count(None) == len(given)
        self.name = self.name or _ask("the name", "NAME", last.get("name"))
        _check_name(self.name)
        numbers = self.num_workers or _ask_workers(last.get("num_workers"))
        # A number that is given twice would start two runs of the same name.
        self.num_workers = tuple(dict.fromkeys(numbers))
        self._check_elastic_numbers()
        for name, _ in RunSeries(self.name, self.num_workers, {}, repeats=self.repeats).names():
            _check_name(name)
        if asked:
            self.task = _ask_task(ctx, last.get("task"))
            if self.task is None:
                subject, default = f"the image ({CUSTOM_IMAGE}: none)", last.get("image")
                self.image = _ask(subject, "--image", default or CUSTOM_IMAGE)
        if self.task is None and not self.command and self.script is None:
            subject = "the command"
            if self.image not in (None, CUSTOM_IMAGE):
                subject += f" of image {self.image}"
            self.command = _ask(subject, "--command", last.get("command"))
        try:
            check_placeholders(self.command or "")
        except ValueError as error:
            # The arguments after -- are not checked, so that a script can get a text in braces.
            raise click.BadParameter(
                f"{error}; words that mean something else go after --", param_hint="--command"
            ) from None
        if self.backend is None and asked:
            default = last.get("backend") or BACKENDS[0]
            choice = click.Choice(BACKENDS)
            self.backend = click.prompt("Backend", type=choice, default=default, err=True)
        if not self.backend:
            backends = BACKENDS if self.task is None else self.task.backends
            self.backend = backends[0]
        try:
            check_backend(self.backend, self.task, self.gpu)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--backend") from None
        self._check_seeds()
        values = {
            "name": self.name,
            "num_workers": self.num_workers,
            "task": None if self.task is None else self.task.key,
            "image": self.image,
            "command": self.command,
            "backend": self.backend,
        }
        settings.remember(settings.LAST_RUN, values)

    @property
    def script(self) -> Script | None:
        """The script that is measured unchanged, None for a task or a command."""
        if not self.script_words:
            return None
        return Script(self.script_words, self.observer)

    def _check_script_options(self) -> None:
        """Refuse options that a script cannot have, and those that only a script has."""
        if self.wait is None:
            # The results of a script are the reason for which it is measured.
            self.wait = self.script is not None
        if self.script is None:
            refuse_options(self.observer, self.task)
            return
        self.script.refuse(
            {
                "--task": self.task,
                "--command": self.command,
                "--image": self.image,
                "--container": self.container,
                "--light": self.light,
            }
        )
        self.script.check(Path(call_folder(self.cwd)))

    def _check_elastic(self) -> None:
        """Refuse an elastic run of a task, and one whose script would be measured."""
        if self.elastic is None:
            return
        if self.task is not None:
            raise click.UsageError(
                "--elastic cannot be given with --task: the workers of a task have a fixed number; "
                "start a script that uses Membership.from_environment()"
            )
        if self.observer:
            raise click.UsageError(
                f"{self.observer[0]} cannot be given with --elastic: the steps of workers that may "
                "die are not measured"
            )

    def _check_elastic_numbers(self) -> None:
        """Refuse a number of workers outside of the range of ``--elastic``."""
        if self.elastic is None:
            return
        try:
            for number in self.num_workers:
                self.elastic.check(number)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--elastic") from None

    def _check_seeds(self) -> None:
        """Refuse seeds that the runs would not use."""
        if self.script is not None and self.seed is None:
            # A script that takes no seed can be repeated, too: its times are never the same.
            return
        try:
            self.series.check_seeds()
        except ValueError as error:
            raise click.UsageError(str(error)) from None

    def _check_engine(self) -> None:
        """Refuse ``--container`` with another engine, and options that need a master or none."""
        if self.container is not None and self.engine not in (None, "local"):
            # Another engine may have an option of this name with another meaning, as sbatch has.
            raise click.UsageError(
                f"--container must be left out with --engine {self.engine}: only local has it"
            )
        if not self.no_master:
            if self.data_dir is not None:
                raise click.UsageError(
                    "--data-dir needs --no-master: "
                    "the folder of a master is an option of 'mlbench master'"
                )
            return
        if self.engine != _run_without_master.ENGINE:
            raise click.UsageError(
                f"--no-master works only with --engine {_run_without_master.ENGINE}: "
                "with another engine, "
                "the master decides when a run starts, or collects its results"
            )
        if self.dashboard_url is not None:
            raise click.UsageError(
                "--dashboard-url cannot be given with --no-master: leave out one of them"
            )
        if self.exclusive:
            raise click.UsageError(
                "--exclusive cannot be given with --no-master: no master keeps other runs waiting; "
                "--engine-options=--exclusive gives each run its own nodes"
            )

    @property
    def series(self) -> RunSeries:
        """The runs to start."""
        return RunSeries(
            self.name, self.num_workers, self._request(), self.task, self.repeats, self.seed
        )

    def _request(self) -> dict[str, Any]:
        """Return the body of ``POST /api/runs/`` without the name and the number of workers."""
        # --gpu and --light are passed on for every kind of run: the master adds them to the
        # workers' command line.
        request: dict[str, Any] = {
            "backend": self.backend,
            "gpu_enabled": self.gpu,
            "light_target": self.light,
        }
        if self.exclusive:
            request["exclusive"] = True
        if self.num_cpus is not None:
            request["num_cpus"] = self.num_cpus
        if self.network is not None:
            request["network"] = str(self.network)
        # Of an image, the workers start in its own folder, with its own environment.
        if self.container is None and self.image in (None, CUSTOM_IMAGE):
            request["caller"] = describe_call(self.cwd)
        if self.cwd is not None:
            request["cwd"] = call_folder(self.cwd)
        if self.env:
            request["environment"] = _variables(self.env)
        if self.fork:
            request["environment"] = {**request.get("environment", {}), FORK_VARIABLE: "1"}
        if self.oversubscribe:
            request["oversubscribe"] = True
        if self.elastic is not None:
            request["elastic"] = str(self.elastic)
        options = _split(self.engine_options or "", "--engine-options")
        if self.container:
            options = ["--container", self.container, *options]
        if options:
            request["engine_options"] = options
        return {**request, **self._program()}

    def _program(self) -> dict[str, Any]:
        """Return the fields of a request that say what the workers run."""
        if self.task is not None:
            return {"task": self.task.key, "arguments": self.arguments}
        if self.script is not None:
            script = self.script
            command = script.command if self.elastic is None else script.plain_command
            return {"command": command}
        words = _split(self.command or "", "--command")
        line = shlex.join([*words, *self.arguments])
        if self.image in (None, CUSTOM_IMAGE):
            self._check_script(words)
            return {"command": line}
        return {
            "image_name": CUSTOM_IMAGE,
            "custom_image_name": self.image,
            "custom_image_command": line,
        }

    def _check_script(self, words: Sequence[str]) -> None:
        """Refuse a command that needs a shell, and a script that does not exist."""
        operator = _OPERATOR.search(_QUOTED.sub("_", self.command or ""))
        if operator:
            raise click.UsageError(
                f"--command must be one program with its arguments, and {operator[0].strip()!r} is "
                "for a shell: write bash -c '...', or quote it"
            )
        first = words[0] if words else ""
        is_assignment = _ASSIGNMENT.match(first)
        if first in _SHELL_WORDS or is_assignment:
            advice = f"bash -c '{first} ...'"
            if is_assignment:
                advice = f"env {first} ..."
            raise click.UsageError(
                f"--command must begin with a program, not {first[:80]!r}: "
                f"no shell runs it, so write {advice}"
            )
        folder = Path(call_folder(self.cwd))
        # The folder is one of another machine.
        if not folder.is_dir():
            return
        # The script is the first word, or it follows an interpreter.
        for position, word in enumerate(words[:2]):
            path = folder / word
            if not word.endswith(".py") or path.is_file() or Path(word).is_absolute():
                continue
            # The first word can be a program anywhere on the PATH.
            if position > 0 or not shutil.which(word):
                raise missing_script(path)


@click.command(cls=_RunCommand)
@click.argument("name", required=False, default="")
@click.argument("num_workers", nargs=-1, type=click.IntRange(min=1))
@click.option(
    "--task", type=_TaskType(), metavar="TASK", help="A benchmark task; see 'mlbench tasks'."
)
@click.option(
    "--image",
    help="Container image of your own program, with --container or an engine that runs containers.",
)
@click.option(
    "--command",
    help="A worker's command line; {run_id} {rank} {hosts} {backend} {seed} are filled in.",
)
@script_options
@click.option(
    "--backend", type=click.Choice(BACKENDS, case_sensitive=False), help="How workers communicate."
)
@click.option("--gpu", "-g", is_flag=True, help="Give each worker a GPU.")
@click.option("--num-cpus", "-c", type=_Cores(), help="Cores for each worker.")
@click.option("--light", "-l", is_flag=True, help="Stop at the task's light goal.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1, max=1000),
    metavar="N",
    help="Start each run N times, with different seeds.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**31),
    metavar="BASE",
    help=(
        "Seed of the first run; "
        f"each further run gets the next one (default with --repeats: {FIRST_SEED})."
    ),
)
@click.option(
    "--exclusive",
    is_flag=True,
    help="Run each run alone: the master starts no other run meanwhile.",
)
@click.option(
    "--engine",
    type=EngineType(),
    help=(
        "What starts the workers, for example slurm "
        "(default: that of the master, or local if it is started now)."
    ),
)
@click.option(
    "--engine-options",
    metavar="TEXT",
    help=(
        "Options of the engine's own command, "
        "for example '--partition=gpu --time=1:00:00' for sbatch."
    ),
)
@click.option(
    "--no-master",
    is_flag=True,
    help=(
        "With --engine slurm: submit the runs from here without a master; "
        "they leave their results in --data-dir."
    ),
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help=(
        "Folder for the runs of --no-master, which all nodes must see "
        "(default: no-master in your data folder)."
    ),
)
@click.option(
    "--container",
    type=click.Choice(PROGRAMS),
    help=(
        "With the local engine: "
        "run each worker in a container of the image, or of the task's own image."
    ),
)
@click.option(
    "--network",
    type=NetworkType(),
    metavar="NETWORK",
    help=(
        "With the local engine: give each worker an emulated host in this network; "
        "see 'mlbench network list'."
    ),
)
@click.option(
    "--cwd",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder in which the workers start (default: the current one).",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help=(
        "Give the workers this variable, by default with its value here; "
        "can be given several times."
    ),
)
@click.option(
    "--oversubscribe",
    is_flag=True,
    help="Allow more than four workers on a core, which mostly wait for each other.",
)
@click.option(
    "--elastic",
    type=_WorkerRangeType(),
    metavar="MIN:MAX",
    help=(
        "With a script for it: replace workers that die, go on with at least MIN workers, "
        "and let at most MAX live."
    ),
)
@fork_option
@click.option("--replace", is_flag=True, help="Delete earlier runs of the same names first.")
@click.option(
    "--wait/--no-wait",
    default=None,
    help=(
        "Watch the runs; at their end show the results and draw the charts "
        "(default for a script: --wait)."
    ),
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the results of --wait (default: mlbench-results/NAME).",
)
@dashboard_option
@json_option
@click.pass_context
def run(ctx: click.Context, **values: Any) -> None:
    """Start one run for each of NUM_WORKERS, named NAME-NUM_WORKERS.

    A training script is measured as it is, and ARGUMENTS after it go to it. Options of this command
    come before the script. -m MODULE in place of SCRIPT.py runs a module:

    \b
        mlbench run mine 1 2 4 --network lan-1g train.py --batch-size 32

    With --task, ARGUMENTS after -- go to the task's script:

    \b
        mlbench run demo 1 2 --task 1a --wait -- --dataset digits

    The workers start in the current folder, and get the variables of this call that libraries read,
    such as NCCL_ALGO and PYTHONPATH. No shell runs the command.

    With --repeats N, the runs are named NAME-NUM_WORKERS-r1 to -rN. No two runs of a call have the
    same seed.

    On a terminal, the command asks for missing values. If no master is configured, it starts one on
    this machine.
    """
    script_words, arguments = ctx.obj
    options = _Options(script_words=script_words, arguments=arguments, **values)
    options.complete(ctx)
    if options.script is not None:
        options.script.show_own_options(Path(call_folder(options.cwd)), ctx.command)
    # Before find_or_start, so that a wrong command line starts no master.
    requests = options.series.requests()
    if options.no_master:
        with _run_without_master.open_runs(options.name, options.data_dir) as direct:
            started = _start(direct, requests, options.replace)
            if options.wait or not options.as_json:
                _run_without_master.show_submitted(direct, started, bool(options.wait))
            _finish(direct, options, started)
        return
    location = _embedded.find_or_start(options.dashboard_url, options.engine)
    with MasterClient(location.url, location.token) as client:
        most = max(options.num_workers)
        if options.elastic is not None:
            most = options.elastic.most
        client.check_workers(most, options.oversubscribe)
        started = _start(client, requests, options.replace)
        if not (options.wait or options.as_json):
            rows = []
            for item in started:
                row = (item["name"], item["id"], item.get("num_workers"), item.get("state"))
                rows.append(row)
            print_table(("RUN", "ID", "WORKERS", "STATE"), rows, right=(1, 2))
            remark(
                f"watch them at {client.url} or with 'mlbench status NAME' and "
                "'mlbench logs NAME --follow'"
            )
        _finish(client, options, started)


def _finish(client: RunSource, options: _Options, started: Sequence[dict[str, Any]]) -> None:
    """Wait for the runs and show their results, or only describe them without ``--wait``."""
    if options.wait:
        if options.script is not None:
            goal: _wait.Goal | None = options.script.goal
        else:
            goal = _goal(options.task, options.light, options.arguments)
        folder = options.output or Path("mlbench-results") / options.name
        has_repeats = options.repeats is not None and options.repeats > 1
        _follow.follow(
            client,
            started,
            goal,
            folder,
            options.as_json,
            pooled=has_repeats,
            is_script=options.script is not None and options.elastic is None,
        )
    elif options.as_json:
        print_json(started)


def _split(text: str, option: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        name = option.removeprefix("--").replace("-", " ")
        raise click.BadParameter(
            f"the {name} must be quoted as for a shell, not {text!r}: {error}", param_hint=option
        ) from None


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``; one without a value has that of this process."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            check_variable(name)
            if not equals:
                if name not in os.environ:
                    raise ValueError(f"{name} is not set here: set it, or write {name}=VALUE")
                value = os.environ[name]
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--env") from None
        variables[name] = value
    return variables


def _interactive() -> bool:
    return sys.stdin.isatty()


def _ask(subject: str, option: str, default: str | None) -> str:
    """Ask for a missing value on a terminal, and raise a usage error elsewhere."""
    # A script must not hang on a question that nobody answers.
    if not _interactive():
        raise click.UsageError(f"{subject} is missing: give {option}")
    question = subject.removeprefix("the ").capitalize()
    answer: str = click.prompt(question, default=default, type=str, err=True)
    return answer


def _ask_task(ctx: click.Context, default: str | None) -> Task | None:
    """Let the user choose a task by its number or key, or None for an own command."""
    if _interactive():
        # The numbers start at 0, as in the menu of version 3.0.
        for index, task in enumerate(TASKS.values()):
            remark(f"  [{index}] task {task.key:3} {task.title} ({task.model}, {task.data})")
        remark(f"  [{len(TASKS)}] a command of your own")
    answer = _ask(
        "the task", "a script, --task TASK (see 'mlbench tasks') or --command COMMAND", default
    )
    if answer == str(len(TASKS)):
        return None
    if answer.isdecimal() and int(answer) < len(TASKS):
        return list(TASKS.values())[int(answer)]
    return _TaskType().convert(answer, None, ctx)


def _ask_workers(default: Sequence[int] | None) -> tuple[int, ...]:
    # Without an earlier run, the question has no default.
    default_text = " ".join(map(str, default or ())) or None
    text = _ask("the number of workers", "NUM_WORKERS", default_text)
    try:
        return parse_workers(text)
    except ValueError as error:
        raise click.UsageError(f"NUM_WORKERS {error}") from None


def _check_name(name: str) -> None:
    if not is_run_name(name):
        raise click.BadParameter(
            "the name of a run must be 1 to 63 lowercase letters, digits and '-', "
            f"without '-' at its ends, not {name!r}",
            param_hint="NAME",
        )


def _start(
    client: RunSource, requests: Sequence[Mapping[str, Any]], replace: bool
) -> list[dict[str, Any]]:
    """Start all runs, after a check of all names.

    With ``replace``, earlier runs of the same names are deleted.
    """
    earlier = {item.get("name"): item for item in client.runs()}
    for request in requests:
        if request["name"] not in earlier:
            continue
        if not replace:
            raise MasterRequestError(
                f"run {request['name']} exists already: "
                "choose another NAME, or give --replace to delete it first",
                409,
            )
        client.check(request)
    # Nothing is deleted for requests that would be refused.
    for request in requests:
        if request["name"] not in earlier:
            continue
        try:
            client.delete(earlier[request["name"]]["id"])
        except MasterRequestError as error:
            # Somebody else may have deleted it.
            if error.status != 404:
                raise
    started: list[dict[str, Any]] = []
    for request in requests:
        try:
            item = client.create(request)
        except MLBenchError:
            if started:
                remark(f"started before the failure: {', '.join(names_of(started))}")
            raise
        started.append(item)
        job = item.get("job_metadata")
        if isinstance(job, Mapping):
            # The master notes here which options it cannot carry out, for example a container
            # image.
            for note in job.get("notes") or ():
                remark(f"{clean(item['name'])}: {clean(note)}")
    return started


def _goal(task: Task | None, light: bool, arguments: Sequence[str]) -> _wait.Goal | None:
    """Return the goal for the progress display."""
    if task is None or task.metric is None:
        return None
    threshold: float | None = None
    # The goal of --goal-after is a training time, which has no threshold.
    if option_value(arguments, "--goal-after") is None:
        threshold = task.goal_of(arguments, light)
    metric = task.metric_of(arguments)
    aim = GoalAim(f"val_global_{metric}", threshold, task.minimize)
    return _wait.Goal(aim, _max_epochs(task, arguments))


def _max_epochs(task: Task, arguments: Sequence[str]) -> int | None:
    """Return the number of epochs after which a run ends without its goal, or None if unknown."""
    if task.key in _VALIDATED_OFTEN:
        return None
    epochs = option_value(arguments, "--epochs")
    if epochs is not None:
        return int(epochs) if epochs.isdecimal() else None
    # A preset may have its own budget, which only the script knows.
    if option_value(arguments, "--preset") is not None:
        return None
    return task.max_epochs
