"""Environment of a process -> which rank of which job it is. Standard library only: training processes import this too."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """A rank of a job, as its launcher named it. `launcher` tells which family of variables said so."""

    job: str
    rank: int
    world_size: int
    local_rank: int
    group: str
    node: str | None
    launcher: str


_FAMILIES = (
    # launcher, rank, world size (first that is set), local rank, run id (first that is set)
    ("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")),
    (
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("SLURM_JOB_ID", "PMIX_NAMESPACE"),
    ),
    ("pmi", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("SLURM_JOB_ID",)),
    ("slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_LOCALID", ("SLURM_JOB_ID",)),
)


def identify(environ: Mapping[str, str], default_job: str = "") -> Identity | None:
    """Return which rank a process with this environment is, or None when no launcher started it.

    torchrun's variables win over MPI's, those over Slurm's: an inner launcher overrides the outer one. The job is EAGLEEYE_JOB,
    else `default_job`, else the launcher's run id, else ``job``; the group of ranks that do the same work is EAGLEEYE_GROUP, else
    ``all``; the node is EAGLEEYE_NODE, else None.
    """
    for launcher, rank_name, size_names, local_name, run_names in _FAMILIES:
        rank = _whole(environ.get(rank_name))
        size = next((n for n in (_whole(environ.get(name)) for name in size_names) if n), None)
        if rank is None or size is None or rank >= size:
            continue
        # torchrun calls a run that nobody named "none".
        run = next((environ[name] for name in run_names if environ.get(name, "none") not in ("none", "")), "")
        return Identity(
            job=environ.get("EAGLEEYE_JOB") or default_job or run or "job",
            rank=rank,
            world_size=size,
            local_rank=_whole(environ.get(local_name)) or 0,
            group=environ.get("EAGLEEYE_GROUP") or "all",
            node=environ.get("EAGLEEYE_NODE") or None,
            launcher=launcher,
        )
    return None


def visible_gpu(environ: Mapping[str, str], local_rank: int) -> str:
    """Return the index or UUID of the GPU that a rank uses: its entry of CUDA_VISIBLE_DEVICES, else its local rank."""
    listed = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    if not listed:
        return str(local_rank)
    return listed[local_rank] if local_rank < len(listed) else listed[0]


def run_dirs(environ: Mapping[str, str], uid: int) -> tuple[Path, ...]:
    """Return the folders in which the progress hook of such a process may write, best first.

    $EAGLEEYE_RUN_DIR if it is set; else /run/eagleeye, else a folder of the user's own below the temporary one.
    """
    if environ.get("EAGLEEYE_RUN_DIR"):
        return (Path(environ["EAGLEEYE_RUN_DIR"]),)
    temporary = environ.get("TMPDIR") or "/tmp"
    return Path("/run/eagleeye"), Path(temporary) / f"eagleeye-{uid}"


def start_ticks(stat_line: bytes | str) -> int:
    """Return when a process started, in clock ticks since boot, from its /proc/PID/stat.

    Raises
    ------
    ValueError
        The line is none of the kernel's.
    """
    text = os.fsdecode(stat_line)
    fields = text[text.rfind(")") + 2 :].split()
    if len(fields) < 20:
        raise ValueError("a truncated stat line")
    return int(fields[19])


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
