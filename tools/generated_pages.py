"""Replace the markers of documentation pages by text that is generated from the code.

A marker is an empty code block, for example ``{commands} run stop``. The writer of its name gets
the words after it. The text is generated when Sphinx reads the page, so it is that of the code from
which the documentation is built."""

from __future__ import annotations

import re
from collections.abc import Callable

import api_reference
import command_reference
import rest_reference
import schema_reference

WRITERS: dict[str, Callable[[str], str]] = {
    "modules": api_reference.write_reference,
    "commands": command_reference.write_commands,
    "requests": rest_reference.write_requests,
    "schema": schema_reference.write_schema,
}
MARKER = re.compile(rf"^```\{{({'|'.join(WRITERS)})\}} *(.*)\n```$", re.MULTILINE)


def fill_page(text: str) -> str:
    """Return the text of a page with generated text in the place of its markers."""
    return MARKER.sub(lambda marker: WRITERS[marker[1]](marker[2]), text)
