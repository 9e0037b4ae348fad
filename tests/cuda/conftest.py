from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.cuda.pretended_gpu import pretended_gpu, why_not


@pytest.fixture(scope="session")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that believes in a GPU."""
    if missing := why_not():
        pytest.skip(missing)
    with pretended_gpu(tmp_path_factory.mktemp("pretended_gpu")) as call:
        yield call
