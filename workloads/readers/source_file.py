"""The file a reader was pointed at: is there anything to read?"""

from pathlib import Path

from workloads.errors import UserError


def source_file(path: str) -> Path:
    """The file at `path`, which can be opened and holds at least one byte.

    A regular file is asked for, no pipe: iterating over a workload twice must give the same requests twice.

    Raises:
        UserError: nothing is there, or a folder, or an empty or unreadable file.
    """
    file = Path(path).expanduser()
    try:
        if file.is_dir():
            raise UserError(f"{path} is a folder; expected a file. Give the path of a file in it.")
        if not file.exists():
            raise UserError(f"{path}: no such file. Check the path; a relative one starts at {Path.cwd()}.")
        if not file.is_file():
            raise UserError(f"{path} is no regular file; a trace is read more than once. Save it to a file first.")
        with file.open("rb") as stream:
            if not stream.read(1):
                raise UserError(f"{path} is empty; expected a trace. Check that it was fetched or written in full.")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from error
    return file
