"""Where figures come from: the processor, and the commit of the code that was measured."""

import platform
import subprocess
from pathlib import Path


def processor() -> str:
    """Name of the processor as /proc/cpuinfo has it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Commit of this checkout, with "-dirty" behind it where files differ from it; None outside of a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:  # there is no git
        return None
    return found.stdout.strip() if found.returncode == 0 else None
