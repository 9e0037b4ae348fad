"""The only room that touches private torch names; each entry says on which versions it was checked.

Everything here was read and run on torch 2.13.0, and run with the CUDA builds of 2.11.0, 2.12.1 and 2.13.0; the 2.11
and 2.12 notes say what differs there. A new torch release is adopted by running the suite (`make test TORCH=...`) and
reading this page, nothing else.
"""

from __future__ import annotations

import re

import torch

OLDEST = (2, 11)
NEWEST = (2, 13)


def release_of(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ImportError(f"zgraph: cannot read the torch version {version!r}; install torch>=2.11,<2.14.")
    return int(found[1]), int(found[2])


def require_supported_torch(version: str) -> None:
    """Refuse a torch that zgraph was not checked with.

    Raises:
        ImportError: version lies outside 2.11 ... 2.13.
    """
    release = release_of(version)
    if release < OLDEST:
        raise ImportError(f"zgraph: torch {version} is too old; install torch>=2.11,<2.14.")
    if release > NEWEST:
        raise ImportError(
            f"zgraph: torch {version} is newer than this zgraph was checked with; install torch>=2.11,<2.14 "
            "or a newer zgraph."
        )


require_supported_torch(torch.__version__)
