"""Checks whether a machine has everything that a training run needs, with advice on what to change."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zgraph.cli.network_interface import Interface, gloo_interface
from zgraph.reporting.tables import size


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check of a machine.

    Attributes:
        group, name: group of checks, and name of this check.
        found: description of what was found.
        status: "ok"; "note": training works, but see the advice; "missing": training does not work without it.
        advice: what to do; "" if the status is "ok".
    """

    group: str
    name: str
    found: str
    status: Literal["ok", "note", "missing"] = "ok"
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def check_machine() -> list[Check]:
    """Run all checks on this machine; if a required package is missing, only the version checks."""
    found = _python_checks()
    if any(check.status == "missing" for check in found):
        return found
    parts: tuple[Callable[[], list[Check]], ...] = (_devices, _backends, _compilers, _network, _caches)
    return [*found, *(check for part in parts for check in part())]


def _python_checks() -> list[Check]:
    """Check the versions of Python, zgraph, torch and triton; works without an importable torch."""
    found = [
        Check(group="versions", name="python", found=platform.python_version()),
        Check(group="versions", name="zgraph", found=_version("zgraph") or "not installed: run from its folder"),
    ]
    try:
        import torch

        importlib.import_module("zgraph.torch_compat")
    except ImportError as error:
        advice = "pip install 'torch>=2.11,<2.16'"
        return [*found, Check(group="versions", name="torch", found=str(error), status="missing", advice=advice)]
    found.append(Check(group="versions", name="torch", found=torch.__version__))
    found.append(_triton())
    front_ends = {name: _version(name) for name in ("accelerate", "transformers", "lightning")}
    found += [Check(group="versions", name=name, found=version) for name, version in front_ends.items() if version]
    return found


def _triton() -> Check:
    import torch

    version = _version("triton")
    if version is not None or not torch.cuda.is_available():
        found = version or "absent; only GPUs need it"
        return Check(group="versions", name="triton", found=found)
    advice = "pip install 'zgraph[triton]'"
    return Check(group="versions", name="triton", found="absent", status="missing", advice=advice)


def _devices() -> list[Check]:
    import torch

    found: list[Check] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {size(properties.total_memory)}"
        found.append(Check(group="devices", name=f"cuda:{index}", found=text))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{platform.machine()}, cores for this process: {cores}, threads of torch: {torch.get_num_threads()}"
    found.append(Check(group="devices", name="cpu", found=text))
    return [*found, *_cpu_features()]


def _cpu_features() -> list[Check]:
    from zgraph.torch_compat.inductor import cpu_features

    features = cpu_features()
    if not features:
        return []
    bf16 = [name for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16") if features.get(name)]
    wide = [name for name in ("avx512_f", "avx2", "sve", "neon") if features.get(name)]
    vectors = Check(group="devices", name="vector instructions", found=", ".join(wide) or "none")
    if bf16:
        return [vectors, Check(group="devices", name="bf16 instructions", found=", ".join(bf16))]
    advice = "on this processor leave out param_dtype=torch.bfloat16: products are many times slower than in float32"
    return [vectors, Check(group="devices", name="bf16 instructions", found="none", status="note", advice=advice)]


def _backends() -> list[Check]:
    import torch
    import torch.distributed as dist

    names = ("gloo", "nccl", "mpi", "xccl")
    built = [name for name in names if dist.is_available() and dist.is_backend_available(name)]
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    found = ", ".join(built) or "none"
    if wanted in built:
        return [Check(group="ranks", name="backends", found=found)]
    advice = f"install a torch that was built with {wanted}"
    return [Check(group="ranks", name="backends", found=found, status="missing", advice=advice)]


def _compilers() -> list[Check]:
    from zgraph.torch_compat.inductor import cpp_compiler

    name = cpp_compiler()
    if name is not None:
        path = shutil.which(name) or name
        return [Check(group="compiler", name="C++", found=f"{path}: {_first_line([path, '--version'])}")]
    advice = 'apt-get install g++, or name one in CXX; options={"lowering": "fx"} trains without'
    return [Check(group="compiler", name="C++", found="none that Inductor knows", status="missing", advice=advice)]


def _network() -> list[Check]:
    interface: Interface = gloo_interface()
    return [
        Check(
            group="ranks",
            name="interface of gloo",
            found=interface.text,
            status=interface.status,
            advice=interface.advice,
        )
    ]


def _caches() -> list[Check]:
    import torch

    from zgraph.torch_compat.inductor import inductor_cache_directory

    folders = {
        "calibration": (Path.home() / ".cache" / "zgraph", "note", "zgraph.calibrate() measures in every process"),
        "Inductor": (Path(inductor_cache_directory()), "missing", "set TORCHINDUCTOR_CACHE_DIR to one that is"),
    }
    if torch.cuda.is_available():
        path = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        folders["Triton"] = (path, "missing", "set TRITON_CACHE_DIR to one that is")
    return [_cache(name, *rest) for name, rest in folders.items()]


def _cache(name: str, folder: Path, unwritable: Any, advice: str) -> Check:
    if is_writable(folder):
        return Check(group="caches", name=name, found=str(folder))
    return Check(group="caches", name=name, found=f"{folder}: not writable", status=unwritable, advice=advice)


def is_writable(folder: Path) -> bool:
    """Return whether files can be created in a folder; for a missing folder, in its nearest existing parent."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout or done.stderr).partition("\n")[0]
