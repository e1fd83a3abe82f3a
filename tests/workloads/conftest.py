"""Real traces, for those who keep them beside the repository."""

from collections.abc import Callable
from pathlib import Path

import pytest

_TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture
def real_trace() -> Callable[[str], str]:
    """Path of a real trace by its file name; the test is skipped where that is absent."""

    def find(name: str) -> str:
        if not (_TRACES / name).is_file():
            pytest.skip(f"real traces are not here: ../shared/traces/{name} is absent")
        return str(_TRACES / name)

    return find
