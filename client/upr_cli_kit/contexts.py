"""Contexts: servers and credentials that a person has named, in a file that only they can read.

The file is ``$UPR_CONTEXTS``, else ``upr/contexts.json`` in ``$XDG_CONFIG_HOME`` or ``~/.config``. It has paths of tokens and
keys, and none of these themselves.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from upr_cli_kit.output import not_found
from upr_protocol.errors import UprError

CONTEXT_FIELDS: Final = ("target", "tls", "tls_ca", "tls_cert", "tls_key", "token_file")
_PATHS: Final = CONTEXT_FIELDS[2:]


def contexts_path() -> Path:
    """Return the path of the file, whether or not it is there."""
    named = os.environ.get("UPR_CONTEXTS")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path.home() / ".config") / "upr" / "contexts.json"


def read_contexts() -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the name of the current context, "" for none, and all contexts by name.

    Raises:
        UprError: the file is malformed.
        OSError: it cannot be read.
    """
    path = contexts_path()
    try:
        found = json.loads(path.read_text())
        contexts = {
            str(name): {key: one[key] for key in CONTEXT_FIELDS if key in one}
            for name, one in found["contexts"].items()
        }
        for one in contexts.values():
            texts = [one["target"], *(one[key] for key in _PATHS if one.get(key))]
            if any(b"\0" in os.fsencode(text) for text in texts):
                raise ValueError
        return str(found["current"]), contexts
    except FileNotFoundError:
        return "", {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UprError(
            f"the file of contexts {path} is malformed",
            reason="CONTEXTS",
            hint="remove it, and add the contexts again",
        ) from None


def write_contexts(current: str, contexts: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the file in one step."""
    path = contexts_path()
    new = path.with_name(f"{path.name}.new")
    text = json.dumps({"current": current, "contexts": contexts}, indent=2, default=str)
    write_private(new, text)
    os.replace(new, path)


def write_private(path: Path, text: str) -> None:
    """Write a line or more into a new file, which only its owner can read, instead of one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")


def chosen(name: str | None) -> dict[str, Any]:
    """Return the fields of a context by option, of the current one without a name; none where there is no current one.

    Raises:
        UprError: there is no context of that name.
    """
    current, contexts = read_contexts()
    name = name or current
    if not name:
        return {}
    fields = find_context(name, contexts)
    return {key: Path(v) if key in _PATHS else v for key, v in fields.items() if v}


def find_context(name: str, contexts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a context; raise UprError if it is not among those of the file."""
    if name not in contexts:
        raise not_found(f"context {name!r}", "context list")
    return contexts[name]
