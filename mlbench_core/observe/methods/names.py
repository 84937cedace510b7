"""Names and options of the methods by which the workers of an unchanged script communicate.

This module does not import torch, so that the command can check the names before a run starts.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlbench_core.arguments import hint_for
from mlbench_core.errors import ConfigurationError

__all__ = [
    "METHODS",
    "MethodChoice",
    "MethodSpec",
    "Option",
    "check_together",
    "parse_method",
    "parse_optimizer",
]

Kind = Literal["as-is", "gradients", "weights", "optimizer"]


@dataclass(frozen=True)
class Option:
    """An option of a method.

    Attributes:
        default: Its value if it is left out; None to take the value of the script's optimizer.
        type: Type of its values.
        least: Smallest allowed value; not used for texts and switches.
        most: Largest allowed value.
        choices: Allowed texts.
    """

    default: int | float | bool | str | None
    type: type[int] | type[float] | type[bool] | type[str]
    least: float = 0
    most: float = math.inf
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.type is bool:
            return "true or false"
        if self.type is str:
            return f"one of {', '.join(self.choices)}"
        noun = "a number"
        if self.type is int:
            noun = "an integer"
        if self.most < math.inf:
            return f"{noun} from {self.least:g} to {self.most:g}"
        return f"{noun} of at least {self.least:g}"

    def parse(self, text: str) -> int | float | bool | str:
        """Return the value of a text.

        Raises:
            ValueError: The text is not an allowed value.
        """
        if self.type is bool:
            return {"true": True, "false": False}[text.lower()]
        if self.type is str:
            self.choices.index(text)
            return text
        value: int | float
        if self.type is int:
            value = int(text)
        else:
            value = float(text)
        # Written so that it is False for NaN.
        if not (math.isfinite(value) and self.least <= value <= self.most):
            raise ValueError(text)
        return value


@dataclass(frozen=True)
class MethodSpec:
    """One line of the table of methods.

    Attributes:
        kind: The values that the workers exchange: those of the script as it is, gradients in place
            of DDP's average, or weights after the step. ``"optimizer"`` replaces the script's
            optimizer, and only ``--optimizer`` takes it.
        help: One line.
        page: The page of the algorithm below ``docs/algorithms``, without its ending.
        options: By name.
        exchanges_steps: True for an optimizer whose workers exchange their steps, without DDP's
            average of gradients.
    """

    kind: Kind
    help: str
    page: str
    options: Mapping[str, Option] = field(default_factory=dict)
    exchanges_steps: bool = False


def _integer(default: int, least: int = 1, most: float = math.inf) -> Option:
    return Option(default, int, least, most)


def _number(default: float | None, most: float = math.inf) -> Option:
    return Option(default, float, most=most)


def _switch(default: bool) -> Option:
    return Option(default, bool)


_FROM_SCRIPT = {"lr": _number(None), "weight_decay": _number(None)}
_QUANTIZATION = {
    "block": _integer(256),
    "rounding": Option("nearest", str, choices=("nearest", "stochastic")),
    "seed": _integer(0, least=0),
}

# The defaults are those of task 1a, benchmarks/task1a_resnet20_cifar10/variants.py, which names the
# source of each.
METHODS: dict[str, MethodSpec] = {
    "as-is": MethodSpec("as-is", "The script's own exchange", "synchronous_sgd"),
    "bf16": MethodSpec("gradients", "Average of gradients sent in bfloat16", "synchronous_sgd"),
    "fp16": MethodSpec("gradients", "Average of gradients sent in float16", "synchronous_sgd"),
    "power_sgd": MethodSpec(
        "gradients", "Average at low rank with error feedback", "power_sgd",
        {"rank": _integer(2), "reuse_query": _switch(True), "error_feedback": _switch(True),
         "start_after_steps": _integer(0, least=0)},
    ),
    "acp_sgd": MethodSpec(
        "gradients", "PowerSGD with one factor in each step", "acp_sgd",
        {"rank": _integer(4), "error_feedback": _switch(True),
         "start_after_steps": _integer(0, least=0)},
    ),
    "sign_sgd": MethodSpec("gradients", "Majority vote of signs", "sign_sgd"),
    "ef_sign_sgd": MethodSpec("gradients", "Scaled signs with error feedback", "sign_sgd"),
    "sparsified_sgd": MethodSpec(
        "gradients", "Largest coordinates with error feedback", "sparsified_sgd",
        {"size": _number(0.01, most=1)},
    ),
    "centralized_sparsified_sgd": MethodSpec(
        "gradients", "Random coordinates, the same on all workers, with error feedback",
        "sparsified_sgd", {"size": _number(0.1, most=1), "seed": _integer(0, least=0)},
    ),
    # Without EF21's own momentum, because the script's optimizer may have one.
    "ef21": MethodSpec(
        "gradients", "Largest changes of each worker's gradient", "ef21",
        {"size": _number(0.1, most=1), "momentum": Option(0.0, float, most=0.999)},
    ),
    "arc_top_k": MethodSpec(
        "gradients", "EF21 with rows that all workers choose alike", "arc_top_k",
        {"size": _number(0.2, most=1), "rank": _integer(4),
         "momentum": Option(0.0, float, most=0.999), "seed": _integer(0, least=0)},
    ),
    "qsgd": MethodSpec(
        "gradients", "Random rounding to a few levels", "qsgd",
        {"levels": _integer(7, most=127), "bucket_size": _integer(512),
         "seed": _integer(0, least=0)},
    ),
    "quantized_sgd": MethodSpec(
        "gradients", "All-reduce in 8 or 4 bits", "quantized_sgd",
        {"bits": Option("8", str, choices=("8", "4")), **_QUANTIZATION},
    ),
    "loco": MethodSpec(
        "gradients", "All-reduce in 4 or 8 bits with error feedback", "quantized_sgd",
        {"bits": Option("4", str, choices=("4", "8")), "error_decay": _number(0.8, most=0.999),
         **_QUANTIZATION},
    ),
    "demo": MethodSpec(
        "gradients", "Largest cosine coefficients of a local momentum", "demo",
        {"decay": _number(0.999, most=1), "top_k": _integer(32), "block_size": _integer(64)},
    ),
    "local_sgd": MethodSpec(
        "weights", "Average of weights every period steps", "local_sgd",
        {"period": _integer(8), "delay": _integer(0, least=0)},
    ),
    "diloco": MethodSpec(
        "weights", "Outer step along the average change every period steps", "diloco",
        {"period": _integer(20), "outer_lr": _number(0.7), "outer_momentum": _number(0.9)},
    ),
    "edit": MethodSpec(
        "weights", "DiLoCo with a penalty for unusually long changes", "diloco",
        {"period": _integer(20), "outer_lr": _number(0.7), "outer_momentum": _number(0.8)},
    ),
    "eager_diloco": MethodSpec(
        "weights", "DiLoCo whose messages travel during the next period", "diloco",
        {"period": _integer(20), "outer_lr": _number(0.4), "outer_momentum": _number(0.9)},
    ),
    "des_loc": MethodSpec(
        "weights", "Averages of weights and moments of Adam in three periods", "des_loc",
        {"period": _integer(8)},
    ),
    "streaming_diloco": MethodSpec(
        "weights", "DiLoCo in fragments that travel during training", "streaming_diloco",
        {"period": _integer(8), "fragments": _integer(2), "delay": _integer(1, least=0),
         "mixing": _number(0.5, most=1), "quantize": _switch(True)},
    ),
    "sparse_loco": MethodSpec(
        "weights", "DiLoCo with a few quantized changes", "sparse_loco",
        {"period": _integer(8), "density": _number(0.03, most=1), "bits": _integer(2, most=8),
         "decay": _number(0.95, most=1), "outer_lr": _number(1.0)},
    ),
    "no_loco": MethodSpec(
        "weights", "Outer step along the average of a random pair every period steps", "no_loco",
        {"period": _integer(20), "outer_lr": _number(0.7), "outer_momentum": _number(0.5),
         "gamma": _number(0.7), "seed": _integer(0, least=0)},
    ),
    "sparta": MethodSpec(
        "weights", "Average of a few random weights after each step", "sparta",
        {"share": _number(0.005, most=1), "seed": _integer(0, least=0)},
    ),
    "decentralized_sgd": MethodSpec(
        "weights", "Average of weights with two neighbors on a ring", "decentralized_sgd"
    ),
    "choco_sgd": MethodSpec(
        "weights", "Compressed differences to two neighbors on a ring", "choco_sgd",
        {"compression": Option("top_k", str, choices=("identity", "random_k", "sign", "top_k")),
         "ratio": _number(0.1, most=1), "gamma": _number(0.2, most=1)},
    ),
    "sgp": MethodSpec("weights", "Half of the weights to one other worker in each step", "sgp"),
    "muon": MethodSpec(
        "optimizer", "Muon for matrices, AdamW for all other parameters", "muon",
        {**_FROM_SCRIPT, "momentum": _number(0.95)},
    ),
    "normuon": MethodSpec(
        "optimizer", "Muon with rows of equal length", "normuon",
        {**_FROM_SCRIPT, "momentum": _number(0.95), "beta2": _number(0.95, most=0.999),
         "polar_express": _switch(False)},
    ),
    "dion2": MethodSpec(
        "optimizer", "Muon on the rows or columns with the largest momentum", "dion2",
        {**_FROM_SCRIPT, "fraction": _number(0.25, most=1), "momentum": _number(0.95),
         "polar_express": _switch(False)},
    ),
    "dion3": MethodSpec(
        "optimizer", "Muon on the rows with the largest momentum, of equal length", "dion2",
        {**_FROM_SCRIPT, "fraction": _number(0.25, most=1), "momentum": _number(0.95),
         "beta2": _number(0.95, most=0.999), "polar_express": _switch(False)},
    ),
    "dion": MethodSpec(
        "optimizer", "Orthonormal updates of low rank", "dion",
        {**_FROM_SCRIPT, "rank": _integer(8), "momentum": _number(0.9, most=1)},
        exchanges_steps=True,
    ),
    "one_bit_adam": MethodSpec(
        "optimizer", "Adam, and after a warm-up one bit per weight", "one_bit_adam",
        {**_FROM_SCRIPT, "warmup_steps": _integer(20)}, exchanges_steps=True,
    ),
}  # fmt: skip
"""The methods by name: those of ``--method``, and with the kind optimizer those of
``--optimizer``."""

# Algorithms of the library that a script cannot take unchanged.
_REFUSED = {
    "scaffold": "it corrects the gradients of plain SGD and reads each step's learning rate, which "
    "an unchanged script does not allow: port the script and use the library's SCAFFOLD",
    "ef21_muon": "it is EF21 with Muon: write --method ef21:momentum=0.9 "
    "--optimizer muon:momentum=0",
    "muloco": "it is DiLoCo with Muon inside: write --method diloco --optimizer muon",
}


# An aggregation of the user: its file, its class, and the text of its options.
_OWN = re.compile(r"(?P<name>.+\.py:[^\W\d]\w*)(?P<colon>:?)(?P<options>.*)")


@dataclass(frozen=True)
class MethodChoice:
    """A method with its options.

    Attributes:
        name: A name of :data:`METHODS`, or ``FILE.py:CLASS`` for an aggregation of the user.
        options: All options of the method by name, with the defaults of those left out. Of an
            aggregation of the user, only the given ones.

    Example:
        >>> str(MethodChoice("diloco", {"period": 50, "outer_lr": 0.7, "outer_momentum": 0.9}))
        'diloco:period=50'
    """

    name: str
    options: Mapping[str, Any]

    @property
    def own_class(self) -> tuple[str, str] | None:
        """The file and the class of an aggregation of the user; None for a known method."""
        file, _, name = self.name.rpartition(":")
        if not file:
            return None
        return file, name

    @property
    def kind(self) -> Kind:
        """The kind of the method."""
        if self.own_class is None:
            return METHODS[self.name].kind
        return "gradients"

    @property
    def label(self) -> str:
        """The text for tables and figures: without the file of the user's class."""
        if self.own_class is None:
            return str(self)
        file, _ = self.own_class
        return str(self).removeprefix(f"{file}:")

    def __str__(self) -> str:
        """Return the text that :func:`parse_method` reads, without options at their default."""
        defaults: dict[str, Any] = {}
        if self.own_class is None:
            for name, option in METHODS[self.name].options.items():
                defaults[name] = option.default
        words = []
        for name, value in self.options.items():
            if name not in defaults or value != defaults[name]:
                word = str(value)
                # The command line has true and false, as JSON and YAML.
                if isinstance(value, bool):
                    word = word.lower()
                words.append(f"{name}={word}")
        if not words:
            return self.name
        return f"{self.name}:{','.join(words)}"


def parse_method(text: str) -> MethodChoice:
    """Read the value of ``--method``.

    Args:
        text: ``NAME`` or ``NAME:key=value,...``. ``FILE.py:CLASS`` in place of the name is an
            aggregation of the user.

    Returns:
        The method with all its options.

    Raises:
        ConfigurationError: The name or an option is unknown, a value is not allowed, or the name
            replaces the optimizer.

    Example:
        >>> parse_method("power_sgd:rank=4").options["rank"]
        4
    """
    choice = _parse("--method", text)
    if choice.kind == "optimizer":
        raise ConfigurationError(
            f"--method must be an exchange between workers, not {choice.name}, which replaces the "
            f"script's optimizer: write --optimizer {text}"
        )
    return choice


def parse_optimizer(text: str) -> MethodChoice:
    """Read the value of ``--optimizer``; see :func:`parse_method`.

    Raises:
        ConfigurationError: The name or an option is unknown, a value is not allowed, or the name
            keeps the script's optimizer.

    Example:
        >>> parse_optimizer("muon:lr=0.02").options["lr"]
        0.02
    """
    choice = _parse("--optimizer", text)
    if choice.kind != "optimizer":
        raise ConfigurationError(
            f"--optimizer must replace the script's optimizer, not {choice.name}, which keeps it: "
            f"write --method {text}"
        )
    return choice


def check_together(method: MethodChoice, optimizer: MethodChoice) -> None:
    """Raise an error if an optimizer exchanges its steps itself and a method is given, too.

    Args:
        method: The value of ``--method``.
        optimizer: The value of ``--optimizer``.

    Raises:
        ConfigurationError: The two cannot be combined.
    """
    if METHODS[optimizer.name].exchanges_steps and method.kind != "as-is":
        raise ConfigurationError(
            f"--method must be as-is with --optimizer {optimizer}, which exchanges its steps "
            f"itself, not {method}: leave one of the two out"
        )


def _parse(flag: str, text: str) -> MethodChoice:
    """Read a name of the table, or a class of the user, with its options."""
    own = _OWN.fullmatch(text.strip())
    if own is not None and flag == "--method":
        return _own_choice(own)
    name, colon, rest = text.strip().partition(":")
    if name in _REFUSED:
        raise ConfigurationError(f"{flag} must not be {name}: {_REFUSED[name]}")
    if name not in METHODS:
        names = []
        for known, spec in METHODS.items():
            if (spec.kind == "optimizer") == (flag == "--optimizer"):
                names.append(known)
        if name.endswith(".py") and flag == "--method":
            raise ConfigurationError(
                f"--method must name a class of its file, not {text!r}: write {name}:CLASS"
            )
        raise ConfigurationError(
            f"{flag} must be NAME or NAME:key=value,..., not {text!r}: "
            + hint_for(name, names, "the names are")
        )
    allowed = METHODS[name].options
    options = {key: option.default for key, option in allowed.items()}
    given: set[str] = set()
    words: list[str] = []
    if colon:
        words = rest.split(",")
    for word in words:
        key, equals, value = word.strip().partition("=")
        if not equals:
            raise ConfigurationError(
                f"{flag} {name} must have options as key=value, not {word!r}: {_options(name)}"
            )
        if key not in allowed:
            hint = _options(name)
            if allowed:
                hint = hint_for(key, list(allowed), "the options are")
            raise ConfigurationError(f"{flag} {name} must not have the option {key!r}: {hint}")
        if key in given:
            raise ConfigurationError(
                f"{flag} {name} must have each option once, not {key} twice: leave one out"
            )
        given.add(key)
        try:
            options[key] = allowed[key].parse(value)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"{key} of {name} must be {allowed[key].allowed}, not {value!r}: write for example "
                f"{flag} {name}:{key}={_example(allowed[key])}"
            ) from error
    return MethodChoice(name, options)


def _own_choice(match: re.Match[str]) -> MethodChoice:
    """Read a class of the user; its constructor checks the options."""
    options: dict[str, Any] = {}
    words: list[str] = []
    if match["colon"]:
        words = match["options"].split(",")
    for word in words:
        key, equals, value = word.strip().partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise ConfigurationError(
                f"--method {match['name']} must have options as key=value, each once, not {word!r}"
            )
        options[key] = {"true": True, "false": False}.get(value.lower(), value)
        for number in (float, int):
            with contextlib.suppress(ValueError):
                options[key] = number(value)
    return MethodChoice(match["name"], options)


def _options(name: str) -> str:
    """Return a sentence about the options of a method."""
    options = METHODS[name].options
    if not options:
        return f"{name} has no options"
    return f"the options are {', '.join(options)}"


def _example(option: Option) -> str:
    """Return the text of an allowed value."""
    if option.default is None:
        return "0.01"
    return str(option.default).lower()
