"""Replace secrets in command lines and environment variables by ``***``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["mask_command_line", "mask_variables"]

# I_MPI_PIN binds processes to cores.
_SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZER)|KEY|SECRET|(?<!BY)PASS|PWD|CREDENTIAL|AUTH|COOKIE"
    r"|(?:^|_)(?:PAT|DSN|SAS|(?<!MPI_)PIN)$",
    re.IGNORECASE,
)
# One of these must be the end of a word in the name: --api-key and --apikey match, --max-tokens and
# --tokenizer do not.
_SECRET_NAME = (
    r"[\w.+-]*"
    r"(?:token|key|secret|password|passwd|passphrase|(?<!by)pass|pwd|credentials?|auth)"
    r"(?![a-z0-9])[\w.-]*"
)
# A flag such as --no-token has no value.
_SECRET_OPTION = re.compile(f"(?!--no-)-{_SECRET_NAME}", re.IGNORECASE)
# Also within a command that is one argument.
_SECRET_SETTING = re.compile(
    rf"(?<!\S)({_SECRET_OPTION.pattern}(?:=|\s+)|{_SECRET_NAME}=)(?:'[^']*'|\"[^\"]*\"|\S+)",
    re.IGNORECASE,
)
# Up to the last @, because a password may contain one.
_URL_USER = re.compile(r"(?<=://)\S*@")
_URL_PARAMETER = re.compile(r"([?&;#][^=&;#\s]*=)[^&;#\s]*")
# A header such as "X-Api-Key: abc", or an entry of a JSON text.
_SECRET_ENTRY = re.compile(
    rf"(?<![\w.+-])({_SECRET_NAME}(?:[\"']\s*:\s*|:\s+)[\"']?)[^\s\"',}}]+", re.IGNORECASE
)
_BEARER = re.compile(r"(?<=\bbearer )\S+", re.IGNORECASE)
_MASK = "***"


def mask_command_line(arguments: Sequence[str]) -> list[str]:
    """Replace the secrets in a command line by ``***``.

    Secrets are the values of options and assignments such as ``--token``, ``--api-key`` or
    ``MLBENCH_TOKEN=``, user names and passwords in URLs, parameters of URLs with such names, and
    bearer tokens.

    Args:
        arguments: The command line.

    Example:
        >>> mask_command_line(["run", "--token", "abc", "--max-tokens=5"])
        ['run', '--token', '***', '--max-tokens=5']
        >>> mask_command_line(["--url=http://me:pw@host/?key=abc"])
        ['--url=http://***@host/?key=***']
    """
    masked: list[str] = []
    is_value = False
    for argument in arguments:
        if is_value:
            masked.append(_MASK)
        else:
            masked.append(_mask(argument))
        # A value that looks like an option, too, has no value after it.
        is_value = not is_value and _SECRET_OPTION.fullmatch(argument) is not None
    return masked


def mask_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Replace the secrets in the values of environment variables by ``***``.

    Args:
        variables: The values by name.

    Example:
        >>> mask_variables({"WANDB_API_KEY": "abc", "NCCL_ALGO": "Ring"})
        {'WANDB_API_KEY': '***', 'NCCL_ALGO': 'Ring'}
        >>> mask_variables({"MLFLOW_TRACKING_URI": "http://me:pw@host"})
        {'MLFLOW_TRACKING_URI': 'http://***@host'}
    """
    masked = {}
    for name, value in variables.items():
        if _SECRET_VARIABLE.search(name):
            masked[name] = _MASK
        else:
            # Its value may have a secret, too, such as a URL with a password.
            masked[name] = _mask(str(value))
    return masked


def _mask(text: str) -> str:
    """Replace the secrets within one text."""

    def parameter(match: re.Match[str]) -> str:
        if not _SECRET_VARIABLE.search(match[1]):
            return match[0]
        return f"{match[1]}{_MASK}"

    text = _BEARER.sub(_MASK, _SECRET_SETTING.sub(rf"\1{_MASK}", as_utf8(text)))
    text = _SECRET_ENTRY.sub(rf"\1{_MASK}", text)
    return _URL_PARAMETER.sub(parameter, _URL_USER.sub(f"{_MASK}@", text))


def as_utf8(text: str) -> str:
    """Return a text that can be written as UTF-8, unlike some names of files and arguments."""
    return text.encode("utf-8", "replace").decode()
