"""zgraph: sharded training as compiler passes over torch.compile graphs."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any


class _Checkout(Distribution):
    """The package metadata that Dynamo reads, so that `backend="zgraph"` also works from a checkout."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return "Metadata-Version: 2.1\nName: zgraph\nVersion: 0\n"
        if filename == "entry_points.txt":
            return "[torch_dynamo_backends]\nzgraph = zgraph.driver.backend:zgraph\n"
        return None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent.parent / path


class _CheckoutFinder(DistributionFinder):
    """Let `importlib.metadata` find the checkout; an installed zgraph is found first.

    The alternative, registering with Dynamo, would load Dynamo, which takes seconds.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        asked = DistributionFinder.Context() if context is None else context
        # A search by package name or folder asks for installed packages only.
        return [_Checkout()] if asked.name is None and asked.path is sys.path else []


sys.meta_path.append(_CheckoutFinder())

# If torch is loaded already, refuse an unsupported version now, and register with a Dynamo that has already looked for
# backends. Otherwise the first public name does this: `zgraph --help` must not load torch, which takes seconds.
if sys.modules.get("torch") is not None:
    importlib.import_module("zgraph.torch_compat.dynamo").register_late("zgraph", "zgraph.driver.backend")


def _homes() -> dict[str, str]:
    """Modules of the public names, each imported at the first access: DTensor and Dynamo take seconds to load."""
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in listed.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_HOMES = MappingProxyType(_homes())
# Names that run operators of the dialect uncompiled. The kernels are in a higher layer, so they are imported here.
_WITH_KERNELS = frozenset({"AdamW8bit", "Offload"})


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        importlib.import_module("zgraph.errors").renamed("zgraph.Pipeline", "zgraph.PassList")
        name = "PassList"
    if name not in _HOMES:
        raise AttributeError(f"module 'zgraph' has no attribute {name!r}")
    importlib.import_module("zgraph.torch_compat")
    if name in _WITH_KERNELS:
        importlib.import_module("zgraph.codegen")
    if _HOMES[name] == "zgraph":
        return importlib.import_module(f"zgraph.{name}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
