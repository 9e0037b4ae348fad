"""A process that believes in a GPU, on a machine that has none.

torch's CUDA build asks the CUDA runtime which devices there are; a library that is loaded before answers for an H100
(`shim/`). Tensors on "cuda" are fake there: a model can be traced, planned and compiled for the device, and nothing
can run on it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SHIM = Path(__file__).parent / "shim"
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
LIMIT_S = 600.0  # of one call


def why_not() -> str:
    """What is missing for such a process here; "" where nothing is."""
    if torch.version.cuda is None:
        return "torch is built without CUDA here; make test-cuda-trace installs a build that has it"
    if torch.cuda.is_available():
        return "there is a GPU: it would be mistaken for the one that is made up"
    if shutil.which("gcc") is None:
        return "gcc is needed to build the library that stands for a GPU"
    if not _header_folders():
        return "no cuda_runtime_api.h is installed beside torch (nvidia-cuda-runtime)"
    return ""


@contextmanager
def pretended_gpu(folder: Path) -> Iterator[Callable[..., Any]]:
    """Calls a function of a module in that process, and returns what it returns or raises what it raises.

    Args:
        folder: where the library and Inductor's caches are put.
    """
    shim, driver = _build(folder)
    more = {
        "LD_PRELOAD": str(shim),
        "LD_LIBRARY_PATH": os.pathsep.join([str(driver.parent), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "OMP_NUM_THREADS": "1",
    }
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        before = {name: os.environ.get(name) for name in more}
        os.environ |= more
        try:
            process.submit(os.getpid).result(LIMIT_S)  # starts it
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        yield lambda function, *args: process.submit(function, *args).result(LIMIT_S)


def _header_folders() -> list[Path]:
    """Folders of the CUDA runtime. Triton's come last: they are of another version, and complete."""
    found = sorted(SITE_PACKAGES.glob("nvidia/*/include/cuda_runtime_api.h"))
    more = SITE_PACKAGES / "triton/backends/nvidia/include"
    return [header.parent for header in found] + ([more] if found and more.exists() else [])


def _build(folder: Path) -> tuple[Path, Path]:
    """The library to be preloaded, and one that is found in the place of the driver's."""
    shim, driver = folder / "libpretended_gpu.so", folder / "driver" / "libcuda.so.1"
    driver.parent.mkdir(parents=True)
    include = [f"-I{header_folder}" for header_folder in _header_folders()]
    gcc = ["gcc", "-shared", "-fPIC", "-w"]
    for command in (
        [*gcc, *include, str(SHIM / "runtime.c"), str(SHIM / "properties.c"), "-o", str(shim)],
        [*gcc, str(SHIM / "runtime.c"), "-o", str(driver)],
    ):
        subprocess.run(command, check=True, timeout=60)
    return shim, driver
