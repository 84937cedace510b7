"""Write the table of the fields of ``result.json`` from its JSON schema.

The page ``docs/reference/result_folder.md`` has the marker ``{schema} result``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlbench_core.results.schema import result_schema

_WORDS = {"integer": "whole number", "boolean": "true or false", "string": "text", "array": "list"}


def write_schema(_name: str = "result") -> str:
    """Write the table of all fields, as Markdown."""
    lines = ["| field | type | meaning |", "|---|---|---|"]
    for path, kind, meaning in list_fields():
        lines.append(f"| `{path}` | {kind} | {meaning} |")
    return "\n".join([*lines, ""])


def list_fields() -> list[tuple[str, str, str]]:
    """Return path, type and meaning of every field of ``result.json``, in the order of the schema.

    The fields of a definition that the schema uses in several places are listed in the first place
    only."""
    schema = result_schema()
    return list(_walk(schema, schema["definitions"], "", set()))


def _walk(
    schema: dict[str, Any], definitions: dict[str, Any], prefix: str, seen: set[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of an object, each followed by its own fields."""
    for name, entry in schema.get("properties", {}).items():
        field, is_nullable = _resolve(entry, definitions)
        kind = _show_type(field)
        if is_nullable:
            kind += " or null"
        if name not in schema.get("required", ()):
            kind += ", may be missing"
        meaning = entry.get("description") or field.get("description", "")
        path = prefix + name
        yield path, kind, meaning.replace("|", r"\|").replace("*", r"\*")
        references = {each["$ref"] for each in entry.get("oneOf", [entry]) if "$ref" in each}
        if references and references <= seen:
            continue
        seen |= references
        if field.get("type") == "array":
            path += "[]"
        inner = field.get("items", field)
        yield from _walk(inner, definitions, f"{path}.", seen)
        further = inner.get("additionalProperties") or {}
        if "properties" in further:
            yield from _walk(further, definitions, f"{path}.NAME.", seen)


def _resolve(field: dict[str, Any], definitions: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the definition to which a field refers, and True if the field may be null."""
    kinds = field.get("oneOf", [field])
    kind = next(kind for kind in kinds if kind.get("type") != "null")
    if "$ref" in kind:
        kind = definitions[kind["$ref"].rpartition("/")[2]]
    return kind, len(kinds) > 1


def _show_type(field: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    return " or ".join(_WORDS.get(str(kind), str(kind)) for kind in kinds)
