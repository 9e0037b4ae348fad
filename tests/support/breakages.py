"""What a torch breaks, at the end of `make test TORCH=...`: versions, missing names, and failed tests by cause."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator

import torch

from zgraph.torch_compat import missing_names

# "torch.distributed.DistStoreError: wait timeout", the last line of a traceback.
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Failure|Failed|Warning|Exit|Interrupt)\b")
_PLACE = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def summary(failed: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines of the summary.

    Args:
        failed: a test's name, and the text of its error: the message, before which its class may stand.
    """
    yield f"torch {torch.__version__}, triton {_version('triton')}, numpy {_version('numpy')}"
    yield f"private names that are missing: {', '.join(missing_names()) or 'none'}"
    causes: dict[str, list[tuple[str, str]]] = {}
    for name, text in failed:
        cause = cause_of(text)
        causes.setdefault(_PLACE.sub("#", cause), []).append((name, cause))
    yield f"tests that failed: {sum(map(len, causes.values()))}, causes: {len(causes)}"
    for found in sorted(causes.values(), key=len, reverse=True):
        yield f"{len(found)} x {found[0][1]}"
        yield from (f"    {name}" for name, _ in found)


def cause_of(text: str) -> str:
    """The first line of an error; of one on several ranks that of the first rank whose traceback ends in one."""
    lines = text.strip().splitlines()
    raised = (line for line in lines[1:] if _ERROR.match(line)) if "Traceback (most recent call last)" in text else ()
    return next(iter([*raised, *lines]), "no text").strip()[:200]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
