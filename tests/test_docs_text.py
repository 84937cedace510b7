"""Pages for users have short sentences in standard words, every page can be found, and commands on
them exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import click
import pytest
from measure_house import WORDS

from mlbench_cli import cli_group

DOCS = Path(__file__).parents[1] / "docs"
MOST_WORDS = 30
FOR_USERS = sorted(
    str(page.relative_to(DOCS))
    for folder in ("start", "tutorials", "howto")
    for page in (DOCS / folder).rglob("*.md")
)


def without_code(text: str) -> str:
    """Remove blocks of code, keep the text of other directives, and replace code in a line by one
    word."""

    def replace(fence: re.Match[str]) -> str:
        # A figure or a note is a directive with sentences in it.
        directive = re.match(
            r"\{(figure|note|tip|warning|important|admonition|grid.*|tab.*)\}[^\n]*\n", fence[2]
        )
        kept = fence[2][directive.end() :] if directive else ""
        return "\n" + re.sub(r"^:[\w-]+:.*$", "", kept, flags=re.MULTILINE) + "\n"

    text = re.sub(r"^ *(`{3,})(.*?)^ *\1`* *$", replace, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *:{3,}.*$|^ *:[\w-]+:.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(\{[\w:-]+\})?(`+)[^`]+\2", "x", text)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def without_targets(text: str) -> str:
    """Replace links by their text."""
    text = re.sub(r"^\[[^\]]+\]: \S+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"https?://\S+", "x", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without code, tables, headings and the targets of links."""
    text = without_targets(without_code(text))
    lines = [line if not re.match(r" *(\||#)", line) else "" for line in text.splitlines()]
    # Each item of a list is a paragraph.
    text = re.sub(r"^ *([*+-]|\d+\.) ", "\n", "\n".join(lines), flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(
            r"(?<=[.?!])[*_\")]*\s+(?=[\"(*_]*[A-Zx0-9])", " ".join(paragraph.split())
        )


def long_sentences(text: str) -> list[str]:
    return [found for found in sentences(text) if len(re.findall(r"\S*\w\S*", found)) > MOST_WORDS]


def other_words(text: str) -> list[str]:
    """Return the words of the style guide's left column, as the measure of the whole source tree
    finds them."""
    text = without_targets(without_code(text))
    found = (re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE) for pattern in WORDS.values())
    return [
        " ".join(text[match.start() : match.end() + 30].split())
        for matches in found
        for match in matches
    ]


def test_a_long_sentence_and_a_word_are_found_in_text_only() -> None:
    words = " ".join(["word"] * MOST_WORDS)
    assert long_sentences(f"{words}.\n\n* {words}\n* {words}") == []
    assert long_sentences(f"One. Other {words}. Three.") == [f"Other {words}."]
    assert long_sentences(f"```{{note}}\n:class: x\n{words} more\n```") == [f"{words} more"]
    assert long_sentences(f":::{{tip}}\n{words} more\n:::") == [f"{words} more"]
    assert long_sentences(f"| {words} more |\n\n```\n{words} more\n```\n\n# {words} more") == []
    assert long_sentences(f"{words[5:]} [a](b%20c).") == []
    assert long_sentences(f"{words} [a](b).") != []
    assert other_words("Text is `told` anew.\n\n```\nanew\n```\n\n[x](told.md)") == ["anew. x"]


@pytest.mark.parametrize("page", FOR_USERS)
def test_sentences_are_short(page: str) -> None:
    assert long_sentences((DOCS / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", FOR_USERS)
def test_words_are_those_of_the_style_guide(page: str) -> None:
    assert other_words((DOCS / page).read_text(encoding="utf-8")) == []


def test_every_page_can_be_reached_through_the_navigation() -> None:
    pages = {page for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for tree in re.findall(
            r"^`{3,}\{toctree\}\n(.*?)^`{3,}", page.read_text(encoding="utf-8"), re.M | re.S
        ):
            entries = [
                line for line in tree.splitlines() if line.strip() and not line.startswith(":")
            ]
            found = {
                (page.parent / re.sub(r".*<(.*)>$", r"\1", entry).strip()).with_suffix(".md")
                for entry in entries
            }
            waiting += found - reached
    assert sorted(map(str, pages - reached)) == []


@pytest.mark.parametrize("page", ["../README.md", *FOR_USERS])
def test_commands_and_options_of_mlbench_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    fences = re.findall(r"^ *(`{3,})(\S*)[^\n]*\n(.*?)^ *\1 *$", text, re.MULTILINE | re.DOTALL)
    blocks = "\n".join(
        content for _, language, content in fences if language in ("", "bash", "console")
    )
    for line in blocks.replace("\\\n", " ").splitlines():
        called = re.match(r"(?:\$ )?mlbench ([a-z][\w-]*)(.*)", line.strip())
        if called is None:
            continue
        context = click.Context(cli_group)
        command: click.Command | None = cli_group.get_command(context, called[1])
        assert command is not None, line
        words = shlex.split(called[2].partition(" -- ")[0], comments=True)
        words = list(takewhile(lambda word: word not in ("|", ">", "&", "&&"), words))
        if (
            isinstance(command, click.Group)
            and words
            and (inner := command.get_command(context, words[0]))
        ):
            command = inner
        # It raises an error for an unknown option.
        command.make_parser(click.Context(command)).parse_args(words)
