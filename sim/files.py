"""Files that are written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workloads.errors import UserError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path` to write to, and renames it to `path` if all went well.

    Raises:
        UserError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def cannot_write(path: Path, error: OSError) -> UserError:
    """The one line for a file that cannot be written."""
    return UserError(
        f"cannot write {path}: {error.strerror or error}; free some space or choose another folder with hydra.run.dir=."
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` with its keys in order; floats keep every digit."""
    with whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_text(path: Path, content: str) -> None:
    """Writes `content` as UTF-8."""
    with whole(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
