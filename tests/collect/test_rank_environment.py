"""What launchers put into the environment, read as a rank."""

import pytest

from eagleeye.collect.environment import identify, run_dirs, visible_gpu

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "gpt"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "815"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}


@pytest.mark.parametrize(
    ("environ", "job", "rank", "size", "local", "launcher"),
    [
        (TORCHRUN, "gpt", 5, 8, 1, "torchrun"),
        (SLURM, "815", 3, 4, 1, "slurm"),
        (OPENMPI, "job", 2, 4, 2, "openmpi"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, "job", 1, 2, 1, "pmi"),
        ({**SLURM, **TORCHRUN}, "gpt", 5, 8, 1, "torchrun"),
        ({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, "815", 5, 8, 1, "torchrun"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, "job", 5, 8, 1, "torchrun"),
        ({**TORCHRUN, "EAGLEEYE_JOB": "mine"}, "mine", 5, 8, 1, "torchrun"),
    ],
)
def test_launchers(environ: dict[str, str], job: str, rank: int, size: int, local: int, launcher: str) -> None:
    found = identify(environ)
    assert found is not None
    assert (found.job, found.rank, found.world_size, found.local_rank, found.launcher) == (job, rank, size, local, launcher)
    assert (found.group, found.node) == ("all", None)


def test_group_node_and_configured_job() -> None:
    found = identify({**TORCHRUN, "EAGLEEYE_GROUP": "stage1", "EAGLEEYE_NODE": "n7"}, default_job="set")
    assert found is not None
    assert (found.job, found.group, found.node) == ("set", "stage1", "n7")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "1"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": ""},
    ],
)
def test_no_rank(environ: dict[str, str]) -> None:
    assert identify(environ) is None


def test_gpu_of_a_rank() -> None:
    assert visible_gpu({}, 3) == "3"
    assert visible_gpu({"CUDA_VISIBLE_DEVICES": "4,5"}, 1) == "5"
    assert visible_gpu({"CUDA_VISIBLE_DEVICES": "GPU-77"}, 1) == "GPU-77"


def test_folders_of_progress_files() -> None:
    assert [str(p) for p in run_dirs({"EAGLEEYE_RUN_DIR": "/shared/run"}, 7)] == ["/shared/run"]
    assert [str(p) for p in run_dirs({"TMPDIR": "/scratch"}, 7)] == ["/run/eagleeye", "/scratch/eagleeye-7"]
