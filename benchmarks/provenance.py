"""Where a result comes from: the commit and the machine."""

import os
import platform
import subprocess
from pathlib import Path


def provenance() -> dict[str, str]:
    """Return ``commit`` (with ``+changes`` when the tree differs from it) and ``machine``."""
    changes = "+changes" if _command("git", "status", "--porcelain") else ""
    machine = f"{_cpu_name()}, {len(os.sched_getaffinity(0))} CPUs, {platform.release()}, Python {platform.python_version()}"
    return {"commit": _command("git", "rev-parse", "--short", "HEAD") + changes, "machine": machine}


def _command(*words: str) -> str:
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
