"""How long `Client.save` stalls a training step, against a memcpy of the same bytes; and what an idle cache costs.

Two nodes on loopback are two ``eagleeye cache`` processes with a storage folder, so a save does all it does in production: the
copy, the digests, the second copy on the neighbour, the write to storage. Interleaved pairs in one process with one thread; only
the ratios of one run mean anything.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from provenance import provenance

from checkpoint import place
from checkpoint.client import LEVELS, Client, Handle
from checkpoint.state import flatten
from eagleeye.clock import monotonic_s

VERB = "from eagleeye.cli import main; raise SystemExit(main())"
IDLE_S = 20.0
WARM_UP, PAIRS = 10, 51
PATIENCE_S = 60.0
TRAIN = Path(__file__).parents[1] / "demo" / "train.py"
RESULT = Path(__file__).parent / "results" / "save_stall.json"


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", type=Path, default=RESULT, help="where the result is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # others' work on the same cores lengthens a save more than a memcpy, as a save has several threads and processes
    result: dict[str, Any] = {**provenance(), "load_average_before": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory(prefix="eagleeye-stall-") as folder, caches(Path(folder)) as run_dir:
        demo, train = demo_job()
        for name, state, work in (
            ("demo: Transformer and AdamW", demo, train),
            ("large: 50 tensors of 4 MiB", large_state(), None),
        ):
            result[name] = stalls(name, state, run_dir, options.pairs, work)
            print(json.dumps(result[name], indent=1), file=sys.stderr)
        print(f"an idle cache over {IDLE_S:g} s", file=sys.stderr)
        result["idle_cache_percent_of_a_core"] = idle_percent(run_dir)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 0


def demo_job() -> tuple[dict[str, Any], Callable[[], None]]:
    """Return the state that the job of `make demo` saves, and one step of its training."""
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    torch.manual_seed(0)
    model = train.Transformer(128, 4, 4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        text = torch.randint(256, (16, 64))
        optimizer.zero_grad(set_to_none=False)
        model(text).square().mean().backward()
        optimizer.step()

    step()
    return {"model": model, "optimizer": optimizer}, step


def large_state() -> dict[str, Any]:
    """Return 50 tensors of 4 MiB, the size of a layer's matrix."""
    return {f"layer{i}": torch.randn(1024, 1024) for i in range(50)}


def stalls(job: str, state: Any, run_dir: str, pairs: int, train: Callable[[], None] | None) -> dict[str, Any]:
    """Return the ratios of save to memcpy: in a training loop, when the last save is through on all levels, and at once after it.

    In a training loop a step is made before the memcpy and one before the save, as in the job: the processor's caches then hold
    neither the tensors nor the buffer of the memcpy.
    """
    tensors = flatten(state).tensors
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    found: dict[str, Any] = {"bytes": nbytes, "tensors": len(tensors)}
    with Client(job.partition(":")[0], 0, 1, run_dir=run_dir) as client:
        step = 0
        nothing = lambda: None  # noqa: E731
        modes = [("quiet", finish, nothing), ("back to back", lambda handle: None, nothing)]
        for name, rest, work in [("in training", finish, train), *modes] if train else modes:
            copies_s: list[float] = []
            saves_s: list[float] = []
            for pair in range(WARM_UP + pairs):
                work()
                copy_s, _ = timed(partial(target.copy_, source))
                step += 1
                work()
                save_s, handle = timed(partial(client.save, step, state))
                handle.wait("cached", PATIENCE_S)
                rest(handle)
                if pair >= WARM_UP:
                    copies_s.append(copy_s)
                    saves_s.append(save_s)
            finish(handle)
            ratios = [save_s / copy_s for save_s, copy_s in zip(saves_s, copies_s, strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            memcpy_s, save_s = statistics.median(copies_s), statistics.median(saves_s)
            found[name] = {
                "save_over_memcpy": {"median": round(median, 2), "quartiles": [round(low, 2), round(high, 2)]},
                "memcpy_ms": round(memcpy_s * 1e3, 3),
                "save_ms": round(save_s * 1e3, 3),
                "longest_save_ms": round(max(saves_s) * 1e3, 3),
                "above_memcpy_us_per_tensor": round((save_s - memcpy_s) * 1e6 / len(tensors), 1),
                "pairs": len(ratios),
            }
    return found


def finish(handle: Handle) -> None:
    """Wait until nothing is left to do for a save, also when a newer one went before it."""
    for level in LEVELS:
        getattr(handle, level).exception(PATIENCE_S)


T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return how long `work` takes, and what it returns."""
    start_s = monotonic_s()
    returned = work()
    return monotonic_s() - start_s, returned


@contextmanager
def caches(folder: Path) -> Iterator[str]:
    """Run two nodes' caches, tell clients of both, and yield the first one's run folder."""
    run_dirs, processes = [folder / "node0", folder / "node1"], []
    try:
        for run_dir in run_dirs:
            words = ["cache", "--node", run_dir.name, "--address", "127.0.0.1", "--port", "0", "--run-dir", str(run_dir)]
            command = [sys.executable, "-c", VERB, *words, "--storage", str(folder / "storage")]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        until_s = monotonic_s() + PATIENCE_S
        while not all(place.local_cache(str(run_dir)) for run_dir in run_dirs):
            if monotonic_s() > until_s:
                raise SystemExit("the caches do not start")
            time.sleep(0.02)
        peers = ",".join(f"{run_dir.name}={place.local_cache(str(run_dir))}" for run_dir in run_dirs)
        os.environ["EAGLEEYE_CHECKPOINT__PEERS"] = peers
        yield str(run_dirs[0])
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def idle_percent(run_dir: str) -> float:
    """Return the share of one core that the cache takes while it holds the states and nobody saves."""
    pid = json.loads((Path(run_dir) / place.INFO).read_text(encoding="utf-8"))["pid"]
    before_s = cpu_s(pid)
    time.sleep(IDLE_S)
    return round(100 * (cpu_s(pid) - before_s) / IDLE_S, 2)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
