"""Names and options of methods, checked without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.observe.methods.names import (
    METHODS,
    Option,
    check_together,
    parse_method,
    parse_optimizer,
)

ROOT = Path(__file__).parents[2]
EXCHANGES = [name for name, spec in METHODS.items() if spec.kind != "optimizer"]


@pytest.mark.parametrize("name", METHODS)
def test_a_name_alone_has_all_options_at_their_defaults(name: str) -> None:
    parse = parse_optimizer if METHODS[name].kind == "optimizer" else parse_method
    choice = parse(name)
    assert choice.options == {key: option.default for key, option in METHODS[name].options.items()}
    assert str(choice) == name


@pytest.mark.parametrize(
    ("text", "canonical", "values"),
    [
        ("power_sgd:rank=4", "power_sgd:rank=4", {"rank": 4, "reuse_query": True}),
        (" power_sgd:reuse_query=False, rank=2", "power_sgd:reuse_query=false", {"rank": 2}),
        ("diloco:outer_lr=1,period=50", "diloco:period=50,outer_lr=1.0", {"outer_lr": 1.0}),
        ("sparsified_sgd:size=1e-3", "sparsified_sgd:size=0.001", {"size": 0.001}),
        ("local_sgd:delay=0", "local_sgd", {"delay": 0}),
        ("choco_sgd:compression=sign", "choco_sgd:compression=sign", {"compression": "sign"}),
    ],
)
def test_options_are_typed_and_the_text_is_canonical(
    text: str, canonical: str, values: dict[str, Any]
) -> None:
    choice = parse_method(text)
    assert str(choice) == canonical
    assert parse_method(canonical) == choice
    for name, value in values.items():
        assert choice.options[name] == value
        assert type(choice.options[name]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dilco",
            "--method must be NAME or NAME:key=value,..., not 'dilco': did you mean 'diloco'?",
        ),
        (
            "zebra",
            "--method must be NAME or NAME:key=value,..., not 'zebra': the names are "
            + ", ".join(EXCHANGES),
        ),
        (
            "power_sgd:rnk=4",
            "--method power_sgd must not have the option 'rnk': did you mean 'rank'?",
        ),
        (
            "power_sgd:zebra=4",
            "--method power_sgd must not have the option 'zebra': the options are rank, "
            "reuse_query, error_feedback, start_after_steps",
        ),
        ("bf16:rank=4", "--method bf16 must not have the option 'rank': bf16 has no options"),
        (
            "local_sgd:8",
            "--method local_sgd must have options as key=value, not '8': the options are period, "
            "delay",
        ),
        (
            "local_sgd:period=4,period=8",
            "--method local_sgd must have each option once, not period twice: leave one out",
        ),
        (
            "local_sgd:period=0",
            "period of local_sgd must be an integer of at least 1, not '0': write for example "
            "--method local_sgd:period=8",
        ),
        (
            "qsgd:levels=128",
            "levels of qsgd must be an integer from 1 to 127, not '128': write for example "
            "--method qsgd:levels=7",
        ),
        (
            "diloco:outer_lr=nan",
            "outer_lr of diloco must be a number of at least 0, not 'nan': write for example "
            "--method diloco:outer_lr=0.7",
        ),
        (
            "power_sgd:reuse_query=1",
            "reuse_query of power_sgd must be true or false, not '1': write for example "
            "--method power_sgd:reuse_query=true",
        ),
        (
            "choco_sgd:compression=zip",
            "compression of choco_sgd must be one of identity, random_k, sign, top_k, not 'zip': "
            "write for example --method choco_sgd:compression=top_k",
        ),
        (
            "muon:lr=0.02",
            "--method must be an exchange between workers, not muon, which replaces the script's "
            "optimizer: write --optimizer muon:lr=0.02",
        ),
        (
            "muloco",
            "--method must not be muloco: it is DiLoCo with Muon inside: write --method diloco "
            "--optimizer muon",
        ),
    ],
)
def test_a_wrong_method_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_method(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("diloco:period=4", "keeps it: write --method diloco:period=4"),
        ("adam", "the names are muon, normuon, dion2, dion3, dion, one_bit_adam"),
        ("muon:lr=fast", "write for example --optimizer muon:lr=0.01"),
    ],
)
def test_a_wrong_optimizer_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_optimizer(text)
    assert part in str(refused.value)


def test_an_optimizer_that_exchanges_its_steps_takes_no_method() -> None:
    check_together(parse_method("as-is"), parse_optimizer("dion"))
    check_together(parse_method("diloco"), parse_optimizer("muon"))
    with pytest.raises(ConfigurationError) as refused:
        check_together(parse_method("bf16"), parse_optimizer("dion:rank=4"))
    assert str(refused.value) == (
        "--method must be as-is with --optimizer dion:rank=4, which exchanges its steps itself, "
        "not bf16: leave one of the two out"
    )


def test_scaffold_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigurationError, match=r"reads each step's learning rate.*port the script"
    ):
        parse_method("scaffold")


def test_the_names_are_those_of_task_1a() -> None:
    from mlbench_core.tasks import get_task

    own = {"as-is", "bf16", "fp16"}
    # The script's own exchange is as-is.
    not_here = {"centralized_sgd", "centralized_adam", "ddp", "scaffold", "muloco", "ef21_muon"}
    assert METHODS.keys() - own == set(get_task("1a").optimizers) - not_here


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, mlbench_core.observe.methods.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def option_text(name: str, option: Option) -> str:
    if option.default is None:
        return f"`{name}` the script's"
    return f"`{name}={str(option.default).lower() if option.type is bool else option.default}`"


def test_the_page_has_the_table() -> None:
    rows = []
    for name, spec in METHODS.items():
        options = ", ".join(option_text(key, option) for key, option in spec.options.items())
        link = f"[{spec.help}](../algorithms/{spec.page}.md)"
        rows.append(f"| `{name}` | {spec.kind} | {link} | {options or 'none'} |")
        assert (ROOT / "docs" / "algorithms" / f"{spec.page}.md").is_file()
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize(
    ("text", "own", "label", "options"),
    [
        ("median.py:Median", ("median.py", "Median"), "Median", {}),
        (
            "a/b-1.py:Top_K:size=1e-3,rank=4,exact=true,mode=fast",
            ("a/b-1.py", "Top_K"),
            "Top_K:size=0.001,rank=4,exact=true,mode=fast",
            {"size": 0.001, "rank": 4, "exact": True, "mode": "fast"},
        ),
    ],
)
def test_a_class_of_the_user_keeps_its_options(
    text: str, own: tuple[str, str], label: str, options: dict[str, Any]
) -> None:
    choice = parse_method(text)
    assert (choice.own_class, choice.label, choice.kind) == (own, label, "gradients")
    assert choice.options == options
    assert [type(value) for value in choice.options.values()] == list(map(type, options.values()))
    assert parse_method(str(choice)) == choice
    assert parse_method("bf16").own_class is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m.py", "--method must name a class of its file, not 'm.py': write m.py:CLASS"),
        ("m.py:4", "--method must name a class of its file, not 'm.py:4': write m.py:CLASS"),
        ("m.py:A:4", "--method m.py:A must have options as key=value, each once, not '4'"),
        ("m.py:A:a=1,a=2", "--method m.py:A must have options as key=value, each once, not 'a=2'"),
    ],
)
def test_a_class_of_the_user_must_be_named_in_full(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_method(text)
    assert str(raised.value) == message
