from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.triton_interpreter import interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls a function where Triton interprets."""
    with interpreter() as call:
        yield call
