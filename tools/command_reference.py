"""Write the reference of the command ``mlbench`` from its click objects.

The page ``docs/reference/command.md`` names commands in the marker ``{commands} run stop``. Each
becomes a section with its usage, its help text and a table of its options. The subcommands of a
group become sections below it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import click

from mlbench_cli.cli import cli_group

# click adds to the help of an option: "[default: 4; x>=1]", "[required]".
_EXTRA = re.compile(r"\s*\[((?:default: |required|[\w.]+<=?x|x[<>]).*)\]$")
_DEFAULT = re.compile(r"\s*\(default: ([^)]*)\)")
# Options, names of environment variables, and placeholders such as {name}.
_CODE = re.compile(r"(?<![\w-])(--[a-z][\w-]*|-- |[A-Z]+(?:_[A-Z]+)+|\{\w+\})")


def write_commands(names: str) -> str:
    """Write the sections of commands.

    Args:
        names: Names of commands of ``mlbench``, separated by spaces.

    Returns:
        Markdown, with a heading of level 3 for each command.
    """
    context = click.Context(cli_group, info_name="mlbench")
    sections = []
    for name in names.split():
        command = cli_group.get_command(context, name)
        if command is None:
            raise ValueError(f"mlbench has no command {name!r}: correct the marker on the page")
        sections += list(_write_command(command, context, name))
    return "\n".join(sections)


def _write_command(
    command: click.Command, parent: click.Context, name: str, level: int = 3
) -> Iterator[str]:
    """Write the section of a command, and below it those of its subcommands."""
    context = click.Context(command, parent=parent, info_name=name)
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    usage = textwrap.fill(usage, 95, subsequent_indent="    ")
    yield f"({path.replace(' ', '-')})=\n\n{'#' * level} {path}\n"
    yield f"{_write_help(command.help or '')}\n\n```text\n{usage}\n```\n"
    yield _write_options(command, context)
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            subcommand = command.get_command(context, sub)
            assert subcommand is not None
            yield from _write_command(subcommand, context, sub, level + 1)


def _write_help(text: str) -> str:
    """Return a help text as Markdown; a paragraph that click must not wrap becomes a code block."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):
            example = textwrap.dedent(paragraph.removeprefix("\b").strip("\n"))
            paragraphs.append(f"```bash\n{example}\n```")
        else:
            paragraphs.append(escape(" ".join(paragraph.split())))
    return "\n\n".join(paragraphs)


def _write_options(command: click.Command, context: click.Context) -> str:
    """Return the table of a command's options; an empty text if it has none but ``--help``."""
    rows = []
    for parameter in command.params:
        if not isinstance(parameter, click.Option):
            continue
        record = parameter.get_help_record(context)
        # click returns None for a hidden option.
        if record is not None:
            names, text = record
            meaning, default = split_default(text)
            names = names.replace("|", r"\|")
            names = names.replace("INTEGER RANGE", "N").replace("FLOAT RANGE", "X")
            rows.append(f"| `{names}` | {escape(meaning)} | {escape(default)} |")
    if not rows:
        return ""
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows, ""])


def split_default(text: str) -> tuple[str, str]:
    """Split the help text of an option.

    Args:
        text: Text as click shows it, with ``(default: ...)`` in it or ``[default: ...; range]`` at
            its end.

    Returns:
        The meaning, with the range of allowed values as a sentence, and the default; ``required``
        if the option must be given.
    """
    default, limits = "", []
    extra = _EXTRA.search(text)
    if extra is not None:
        text = text[: extra.start()]
        for item in extra[1].split("; "):
            if item.startswith("default: "):
                default = item.removeprefix("default: ")
            elif item == "required":
                default = item
            else:
                limits.append(_describe_range(item))
    written = _DEFAULT.search(text)
    if written is not None:
        default = written[1]
        text = text[: written.start()] + text[written.end() :]
    return " ".join([text, *limits]), default


def _describe_range(limits: str) -> str:
    """Return click's description of a range, such as ``1<=x<=9``, as a sentence."""
    both = re.fullmatch(r"(.+)<=x<=(.+)", limits)
    if both is not None:
        return f"Allowed: {both[1]} to {both[2]}."
    words = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}
    one = re.fullmatch(r"x([<>]=?)(.+)", limits)
    if one is not None:
        return f"Allowed: {words[one[1]]} {one[2]}."
    return f"Allowed: `{limits}`."


def escape(text: str) -> str:
    """Return a help text as Markdown.

    Quoted words, options and words in capitals with underscores become code.
    """
    text = re.sub(r"(?<!\w)'([^']+)'(?!\w)", r"`\1`", text)
    parts = re.split(r"(`[^`]*`)", text)
    # The other parts are code already.
    for i in range(0, len(parts), 2):
        parts[i] = _CODE.sub(_as_code, parts[i])
        parts[i] = parts[i].replace("*", r"\*").replace("<", r"\<")
    return "".join(parts).replace("|", r"\|")


def _as_code(word: re.Match[str]) -> str:
    """Return a word as code, with the space after it outside."""
    return f"`{word[0].strip()}`" + " " * word[0].endswith(" ")
