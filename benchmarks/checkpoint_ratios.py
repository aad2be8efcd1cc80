"""The checkpoint engine against memcpy, plain sockets, plain O_DIRECT, and what others use; ratios of interleaved pairs.

Nodes on loopback are ``eagleeye cache`` processes, so a save does all it does in production: the copy, the digests, the copy on
the neighbour, the write to storage. A ratio is the median over pairs of one of ours and one of theirs, made one right after the
other; only such ratios mean anything on a shared machine. torch uses one thread.

``X_vs_memcpy`` is our time over that of a memcpy of as many bytes into memory that was used before: smaller is better.
``X_vs_save`` and ``X_vs_restore`` are the time of X over ours, the others our rate over that of X: larger is better.
"""

import argparse
import contextlib
import functools
import importlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from provenance import provenance
from pump import pump

from checkpoint import place
from checkpoint.client import LEVELS, Client, Handle
from checkpoint.manifest import Generation, Key, made_of
from checkpoint.server import Settings
from checkpoint.state import flatten
from checkpoint.storage import Folder

RESULT = Path(__file__).parent / "results" / "checkpoint.json"
VERB = "from eagleeye.cli import main; raise SystemExit(main())"
PATIENCE_S = 120.0
IDLE_S = 20.0
THROTTLED_BYTES_PER_S = 71e6
"""What the paper's storage gives each rank."""
PEERS = {
    "torchsnapshot": "torchsnapshot==0.1.0",
    "torch_checkpointing": "torch-checkpointing==0.1.1",
    "lm_resiliency": "lm-resiliency==0.2.0",
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `pairs` of each, of those that take seconds `slow_pairs`."""

    large_bytes: int
    width: int
    layers: int
    words: int
    small_tensors: int
    warm_up: int
    pairs: int
    slow_pairs: int
    idle_s: float
    bytes_per_s: float


FULL = Scale(256 << 20, 384, 8, 16384, 8192, 3, 21, 5, IDLE_S, THROTTLED_BYTES_PER_S)
QUICK = Scale(8 << 20, 64, 1, 256, 64, 1, 2, 2, 0.2, 10 * THROTTLED_BYTES_PER_S)


@dataclass
class Found:
    """What a part of the benchmark finds: the ratios of all pairs of each key, and what else is worth telling of it."""

    ratios: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)

    def pair(self, key: str, upper_s: float, lower_s: float) -> None:
        """Note one pair: the times of which the first is divided by the second."""
        self.ratios.setdefault(key, []).append(upper_s / lower_s)

    def tell(self, key: str, **details: Any) -> None:
        """Note what else is worth telling."""
        self.details.setdefault(key, {}).update(details)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="KEY", choices=list(KEYS), help="measure these, and keep the other results")
    parser.add_argument("--quick", action="store_true", help="try the script itself: the figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the result is written")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part:
        found = PARTS[options.part](QUICK if options.quick else FULL)
        print(json.dumps({"ratios": found.ratios, "details": found.details}))
        return 0
    wanted = options.only or list(KEYS)
    parts = list(dict.fromkeys(KEYS[key] for key in wanted))
    for part in parts:
        for module in NEEDED.get(part, ()):
            need(module)
    result = json.loads(options.out.read_text(encoding="utf-8")) if options.only and options.out.exists() else {}
    where = provenance()  # before the result itself is a change
    result = {"ratios": {}, "spread": {}, "details": {}} | result | where
    for number, part in enumerate(parts, 1):
        print(
            f"[{number}/{len(parts)}] {part}: {', '.join(key for key in wanted if KEYS[key] == part)}",
            file=sys.stderr,
            flush=True,
        )
        told = measured(part, options.quick)
        for key in wanted:
            if KEYS[key] == part:
                ratios = told["ratios"][key]
                result["ratios"][key] = significant(statistics.median(ratios))
                result["spread"][key] = [significant(min(ratios)), significant(max(ratios))]
                result["details"][key] = {"pairs": len(ratios), **told["details"].get(key, {}), **where}
                print(f"    {key}: {result['ratios'][key]} {result['spread'][key]}", file=sys.stderr, flush=True)
        result["details"] |= {key: value for key, value in told["details"].items() if key not in KEYS}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("ratios", "spread")}, indent=1))
    return 0


def measured(part: str, quick: bool) -> Any:
    """Return what a part finds, in a process of its own: what others leave behind in a process disturbs no one."""
    words = [sys.executable, __file__, "--part", part, *(["--quick"] if quick else [])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} failed with exit code {done.returncode}; nothing of it was written")
    return json.loads(done.stdout.splitlines()[-1])


def need(module: str) -> None:
    """Raise SystemExit with a sentence when a peer cannot be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(
            f"{module} cannot be imported ({error}): run `make bench-checkpoint`, or pip install {PEERS.get(module, module)}"
        ) from None


def significant(ratio: float) -> float:
    """Return a ratio to three significant digits."""
    return float(f"{ratio:.3g}")


T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return how long `work` takes, in seconds, and what it returns."""
    began_s = time.perf_counter()
    returned = work()
    return time.perf_counter() - began_s, returned


# ---- what is saved


def large_state(scale: Scale) -> dict[str, Any]:
    """Return tensors of 4 MiB, the size of a layer's matrix."""
    return {f"layer{i}": torch.randn(1024, 1024) for i in range(scale.large_bytes >> 22)}


def small_state(scale: Scale) -> dict[str, Any]:
    """Return tensors of 16 KiB."""
    return {f"bias{i}": torch.randn(4096) for i in range(scale.small_tensors)}


def transformer(scale: Scale) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a small GPT and its AdamW after one step."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(scale.width, 4, 4 * scale.width, batch_first=True, dropout=0.0)
    body = torch.nn.TransformerEncoder(block, scale.layers, enable_nested_tensor=False)
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(scale.words, scale.width), "body": body})
    optimizer = torch.optim.AdamW(model.parameters())
    body(model["words"](torch.randint(scale.words, (2, 16)))).square().mean().backward()
    optimizer.step()
    return model, optimizer


def mix_state(scale: Scale) -> dict[str, Any]:
    """Return the state of a small GPT and its AdamW as plain dicts, which all peers can save."""
    model, optimizer = transformer(scale)
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def size_bytes(state: Any) -> int:
    """Return how many bytes the tensors of a state have."""
    return sum(tensor.nbytes for tensor in flatten(state).tensors)


class Memcpy:
    """A copy of as many bytes as a state has, between buffers that were used before."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    def __call__(self) -> None:
        self._target.copy_(self._source)


# ---- caches


@contextlib.contextmanager
def caches(count: int, *flags: str, storage: bool = False) -> Iterator[list[str]]:
    """Run the caches of some nodes, tell clients of all, and yield their run folders. Storage lies on this disk."""
    with tempfile.TemporaryDirectory(prefix="eagleeye-bench-", dir=disk()) as name, contextlib.ExitStack() as ended:
        folder = Path(name)
        run_dirs = [folder / f"node{i}" for i in range(count)]
        shared = ["--storage", str(folder / "storage")] if storage else []
        for run_dir in run_dirs:
            words = ["cache", "--node", run_dir.name, "--address", "127.0.0.1", "--port", "0", "--run-dir", str(run_dir)]
            process = subprocess.Popen([sys.executable, "-c", VERB, *words, *shared, *flags], stdout=subprocess.DEVNULL)
            ended.callback(process.wait)
            ended.callback(process.kill)
        until_s = time.monotonic() + PATIENCE_S
        while not all(place.local_cache(str(run_dir)) for run_dir in run_dirs):
            if time.monotonic() > until_s:
                raise SystemExit("the caches do not start")
            time.sleep(0.05)
        peers = ",".join(f"{run_dir.name}={place.local_cache(str(run_dir))}" for run_dir in run_dirs)
        os.environ["EAGLEEYE_CHECKPOINT__PEERS"] = peers
        yield [str(run_dir) for run_dir in run_dirs]


def disk() -> str:
    """Return a folder on a disk: where the temporary folder lies in memory, this one."""
    return "/var/tmp" if os.path.ismount("/tmp") else tempfile.gettempdir()


def finish(handle: Handle) -> None:
    """Wait until nothing is left to do for a save, also when a newer one went before it."""
    for level in LEVELS:
        getattr(handle, level).exception(PATIENCE_S)


# ---- the parts


def save_stalls(scale: Scale) -> Found:
    """A save against a memcpy, when nothing is left to do for the last one; idle CPU and memory of the cache after that."""
    found = Found()
    with caches(2, storage=True) as run_dirs:
        for kind, make in (("large", large_state), ("mix", mix_state), ("small", small_state)):
            state = make(scale)
            nbytes, memcpy = size_bytes(state), Memcpy(size_bytes(state))
            with Client(kind, 0, 1, run_dir=run_dirs[0]) as client:
                for overlap in (False, True) if kind == "mix" else (False,):
                    key = "save_overlapped_vs_memcpy" if overlap else f"save_{kind}_vs_memcpy"
                    copies_s: list[float] = []
                    for pair in range(-scale.warm_up, scale.pairs):
                        step = int(overlap) * 1000 + pair + scale.warm_up
                        copy_s, _ = timed(memcpy)
                        save_s, handle = timed(functools.partial(client.save, step, state, overlap=overlap))
                        client.fence()
                        handle.wait("cached", PATIENCE_S)
                        finish(handle)
                        if pair >= 0:
                            found.pair(key, save_s, copy_s)
                            copies_s.append(copy_s)
                    tensors, memcpy_ms = len(flatten(state).tensors), 1e3 * statistics.median(copies_s)
                    found.tell(key, bytes=nbytes, tensors=tensors, memcpy_ms=round(memcpy_ms, 2))
                if kind == "large":
                    found.tell("cache", **footprint(run_dirs[0], nbytes))
        found.tell("cache", idle_percent_of_a_core=idle_percent(run_dirs[0], scale.idle_s))
    return found


def footprint(run_dir: str, nbytes: int) -> dict[str, Any]:
    """Return what memory a cache takes for a state, and how much of it is neither slabs nor code."""
    pid = pid_of(run_dir)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    slabs = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "eagleeye-slab" in os.readlink(path):
                slabs[path.stat().st_ino] = path.stat().st_size
    return {
        "state_bytes": nbytes,
        "slab_bytes": sum(slabs.values()),
        "slabs": len(slabs),
        "anonymous_bytes": int(status["RssAnon"].split()[0]) << 10,
    }


def pid_of(run_dir: str) -> int:
    """Return the process of a cache."""
    return int(json.loads((Path(run_dir) / place.INFO).read_text(encoding="utf-8"))["pid"])


def idle_percent(run_dir: str, seconds: float) -> float:
    """Return the share of one core that a cache takes while it holds states and nobody saves."""
    before_s = cpu_s(pid_of(run_dir))
    time.sleep(seconds)
    return round(100 * (cpu_s(pid_of(run_dir)) - before_s) / seconds, 2)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def against(scale: Scale, key: str, pairs: int, theirs: Callable[[int, Any, Path], Callable[[], None] | None]) -> Found:
    """Return the stalls of another way to save the transformer's state, each right after one of ours.

    `theirs` is given the number of the save, the state and a folder on the disk; it is timed, and what it returns is called
    afterwards, to let it finish what it does behind training's back.
    """
    found = Found()
    state = mix_state(scale)
    with (
        caches(2, storage=True) as run_dirs,
        Client("peers", 0, 1, run_dir=run_dirs[0]) as client,
        tempfile.TemporaryDirectory(prefix="eagleeye-peer-", dir=disk()) as folder,
    ):
        ours, peers = [], []
        for pair in range(-scale.warm_up, pairs):
            ours_s, handle = timed(functools.partial(client.save, pair + scale.warm_up, state))
            finish(handle)
            there = Path(folder) / str(pair)
            theirs_s, rest = timed(functools.partial(theirs, pair + scale.warm_up, state, there))
            if rest is not None:
                rest()
            shutil.rmtree(there, ignore_errors=True)
            there.unlink(missing_ok=True)
            if pair >= 0:
                found.pair(key, theirs_s, ours_s)
                ours.append(ours_s)
                peers.append(theirs_s)
    found.tell(key, bytes=size_bytes(state), ours_ms=milliseconds(ours), theirs_ms=milliseconds(peers))
    return found


def milliseconds(times_s: list[float]) -> float:
    """Return the median in milliseconds."""
    return round(1e3 * statistics.median(times_s), 2)


def torch_save(scale: Scale) -> Found:
    """torch.save to a file of this disk, and fsync."""

    def save(_: int, state: Any, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    return against(scale, "torch_save_fsync_vs_save", scale.slow_pairs, save)


class Throttled:
    """A file through which so many bytes a second go, as of storage that many ranks share."""

    def __init__(self, file: Any, bytes_per_s: float) -> None:
        self._file, self._bytes_per_s = file, bytes_per_s
        self._began_s, self._passed = time.monotonic(), 0

    def write(self, data: Any) -> int:
        """Write as fast as allowed."""
        return self._pass(self._file.write(data))

    def read(self, size: int = -1) -> bytes:
        """Read as fast as allowed."""
        data = self._file.read(size)
        self._pass(len(data))
        return bytes(data)

    def readinto(self, room: Any) -> int:
        """Read into memory as fast as allowed."""
        return self._pass(self._file.readinto(room))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _pass(self, count: int) -> int:
        self._passed += count
        time.sleep(max(0.0, self._began_s + self._passed / self._bytes_per_s - time.monotonic()))
        return count


def torch_save_throttled(scale: Scale) -> Found:
    """torch.save to a file of this disk that takes 71 MB/s, as the paper's storage gives each rank, and fsync."""

    def save(_: int, state: Any, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, Throttled(file, scale.bytes_per_s))
            file.flush()
            os.fsync(file.fileno())

    key = "torch_save_throttled_vs_save"
    found = against(scale, key, scale.slow_pairs, save)
    found.tell(key, throttled_bytes_per_s=scale.bytes_per_s)
    return found


def dcp_async(scale: Scale) -> Found:
    """torch.distributed.checkpoint.async_save as it comes."""
    import torch.distributed.checkpoint as dcp

    def save(_: int, state: Any, path: Path) -> Callable[[], None]:
        return waiting(dcp.async_save(state, checkpoint_id=str(path), no_dist=True))

    return against(scale, "dcp_async_vs_save", scale.slow_pairs, save)


def dcp_async_reused(scale: Scale) -> Found:
    """torch.distributed.checkpoint.async_save with one stager for all saves, which keeps its memory."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # without CUDA none of its ways past the training thread is allowed but shared memory
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(_: int, state: Any, path: Path) -> Callable[[], None]:
        return waiting(dcp.async_save(state, checkpoint_id=str(path), async_stager=stager, no_dist=True))

    return against(scale, "dcp_async_reused_vs_save", scale.slow_pairs, save)


def waiting(saving: Any) -> Callable[[], None]:
    """Return what waits for a save of torch.distributed.checkpoint, whichever of its two answers it gave."""
    future = getattr(saving, "upload_completion", saving)
    return lambda: future.result(PATIENCE_S)


def torchsnapshot_async(scale: Scale) -> Found:
    """torchsnapshot.Snapshot.async_take."""
    import torchsnapshot

    def save(_: int, state: Any, path: Path) -> Callable[[], None]:
        pending = torchsnapshot.Snapshot.async_take(str(path), {"state": torchsnapshot.StateDict(**state)})
        return lambda: pending.wait()

    return against(scale, "torchsnapshot_vs_save", scale.slow_pairs, save)


def torch_checkpointing_steady(scale: Scale) -> Found:
    """torch_checkpointing once it has its memory: until the state may change again, which is when its lock can be had."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # its writes past the page cache are not aligned, which ext4 refuses
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    with contextlib.closing(CheckpointManager(CheckpointManager.Config(storage_config=storage))) as manager:

        def save(_: int, state: Any, path: Path) -> Callable[[], None]:
            writing = manager.save(str(path), state)
            with manager.lock():
                return lambda: writing.result(PATIENCE_S)

        return against(scale, "torch_checkpointing_vs_save", scale.slow_pairs, save)


def lm_resiliency_save(scale: Scale) -> Found:
    """The in-memory manager of lm-resiliency, without replication: until the state may change again."""
    from lm_resiliency import InMemoryCkptConfig
    from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

    with tempfile.TemporaryDirectory(prefix="eagleeye-lmr-", dir=disk()) as folder:
        config = InMemoryCkptConfig(disk_flush_interval=0, disk_folder=folder, run_id="bench", pin_memory=False)
        manager = InMemoryCheckpointManager(config)

        def save(step: int, state: Any, _: Path) -> None:
            manager.save(state, step)
            manager.maybe_wait()

        found = against(scale, "lm_resiliency_vs_save", scale.pairs, save)
        manager.close()
    return found


def restores(scale: Scale) -> Found:
    """A fresh process fills tensors that were used before: from the cache, by memcpy, and by torch.load of the same state."""
    found = Found()
    state = large_state(scale)
    nbytes = size_bytes(state)
    with caches(1) as run_dirs, tempfile.TemporaryDirectory(prefix="eagleeye-load-", dir=disk()) as folder:
        path = Path(folder) / "state.pt"
        torch.save(state, path)
        with Client("restore", 0, 1, run_dir=run_dirs[0]) as client:
            client.save(1, state).wait("cached", PATIENCE_S)
        time.sleep(settle_s(scale))
        cold = []
        for pair in range(-1, scale.slow_pairs):
            words = [sys.executable, __file__, "--restore", run_dirs[0], str(path), str(nbytes), str(scale.bytes_per_s)]
            told = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
            if pair < 0:
                continue
            found.pair("restore_vs_memcpy", told["restore_s"], told["memcpy_s"])
            found.pair("torch_load_cached_vs_restore", told["load_s"], told["restore_s"])
            found.pair("torch_load_throttled_vs_restore", told["throttled_s"], told["restore_s"])
            cold.append(told["cold_s"] / told["memcpy_s"])
    found.tell("restore_vs_memcpy", bytes=nbytes, cold_over_memcpy=significant(statistics.median(cold)))
    found.tell("torch_load_throttled_vs_restore", throttled_bytes_per_s=scale.bytes_per_s)
    return found


def settle_s(scale: Scale) -> float:
    """Return how long a cache is given to make large pages of what was saved, which a job does between saves."""
    return min(15.0, scale.idle_s)


def restore_once(run_dir: str, path: str, nbytes: int, bytes_per_s: float) -> dict[str, float]:
    """In a fresh process: load into warm tensors, right after a memcpy into them, then the other ways."""
    into = {f"layer{i}": torch.full((1024, 1024), 1.0) for i in range(nbytes >> 22)}
    source = {name: torch.full_like(tensor, 2.0) for name, tensor in into.items()}
    memcpy_s, _ = timed(lambda: [tensor.copy_(source[name]) for name, tensor in into.items()])
    memcpy_s, _ = timed(lambda: [tensor.copy_(source[name]) for name, tensor in into.items()])
    with Client("restore", 0, 1, run_dir=run_dir) as client:
        restore_s, restored = timed(lambda: client.load(into=into))
        if restored is None or restored.source != "local":
            raise SystemExit("nothing was restored from this node's memory")
        load_s, loaded = timed(lambda: torch.load(path, weights_only=True))
        if not all(torch.equal(tensor, loaded[name]) for name, tensor in into.items()):
            raise SystemExit("what was restored is not what was saved")
        del loaded
        with open(path, "rb") as file:
            throttled_s, _ = timed(lambda: torch.load(Throttled(file, bytes_per_s), weights_only=True))
        cold_s, _ = timed(client.load)
    return {"memcpy_s": memcpy_s, "restore_s": restore_s, "load_s": load_s, "throttled_s": throttled_s, "cold_s": cold_s}


def replication(scale: Scale) -> Found:
    """A copy to a neighbour, from the moment that the cache has the state, against as many bytes through plain sockets."""
    found = Found()
    state = large_state(scale)
    nbytes, connections = size_bytes(state), Settings().connections
    with caches(2) as run_dirs, pump(nbytes, connections) as send, Client("copies", 0, 1, run_dir=run_dirs[0]) as client:
        for pair in range(-scale.warm_up, scale.pairs):
            pump_s = send()
            handle = client.save(pair + scale.warm_up, state)
            handle.wait("cached", PATIENCE_S)
            ours_s, _ = timed(functools.partial(handle.wait, "replicated", PATIENCE_S))
            if pair >= 0:
                found.pair("replicate_vs_pump", pump_s, ours_s)
    found.tell("replicate_vs_pump", bytes=nbytes, connections=connections)
    return found


def neighbour_restore(scale: Scale) -> Found:
    """A load on a node that holds nothing, into tensors that were used before, against as many bytes through plain sockets."""
    found = Found()
    state, into = large_state(scale), large_state(scale)
    nbytes, connections = size_bytes(state), Settings().connections
    with caches(3) as run_dirs, pump(nbytes, connections) as send:
        for pair in range(-scale.warm_up, scale.slow_pairs):
            with Client("moves", 0, 1, run_dir=run_dirs[0]) as client:
                client.load()
                client.save(pair + scale.warm_up, state).wait("replicated", PATIENCE_S)
            with Client("moves", 0, 1, run_dir=run_dirs[2]) as client:
                pump_s = send()
                ours_s, restored = timed(functools.partial(client.load, into))
            if restored is None or restored.step != pair + scale.warm_up or restored.source != "neighbour":
                raise SystemExit("the newest state was not restored from a neighbour")
            if pair >= 0:
                found.pair("neighbour_restore_vs_pump", pump_s, ours_s)
    found.tell("neighbour_restore_vs_pump", bytes=nbytes, connections=connections, holders=restored.holder)
    return found


def flush(scale: Scale) -> Found:
    """A shard written to storage as the cache does it, digests checked and all synced, against a plain O_DIRECT writer."""
    found = Found()
    memory = mmap.mmap(-1, scale.large_bytes)
    memory.write(os.urandom(1 << 20) * (scale.large_bytes >> 20))
    with tempfile.TemporaryDirectory(prefix="eagleeye-flush-", dir=disk()) as name:
        folder = Folder(Path(name) / "storage")
        folder.path.mkdir()
        for pair in range(-scale.warm_up, scale.pairs):
            plain_s, direct = timed(functools.partial(written, Path(name) / "plain", memory))
            key = Key("flush", Generation(1, pair + scale.warm_up, "00000000"), 0)
            manifest = made_of(key, 1, "node0", {}, memoryview(memory))
            ours_s, _ = timed(functools.partial(folder.write, manifest, memoryview(memory)))
            folder.commit("flush", key.generation, 1)
            folder.retain("flush", 1)
            if pair >= 0:
                found.pair("flush_vs_odirect", plain_s, ours_s)
    found.tell("flush_vs_odirect", bytes=scale.large_bytes, past_the_page_cache=direct)
    return found


def written(path: Path, memory: Any, piece_bytes: int = 16 << 20) -> bool:
    """Write memory to a new file past the page cache, sync it, and return whether the file system can do that."""
    path.unlink(missing_ok=True)
    try:
        file, direct = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT), True
    except OSError:
        file, direct = os.open(path, os.O_CREAT | os.O_WRONLY), False
    try:
        with memoryview(memory) as data:
            for start in range(0, len(data), piece_bytes):
                os.pwrite(file, data[start : start + piece_bytes], start)
        os.fsync(file)
    finally:
        os.close(file)
    return direct


PARTS: dict[str, Callable[[Scale], Found]] = {
    "save stall": save_stalls,
    "torch.save": torch_save,
    "torch.save throttled": torch_save_throttled,
    "dcp": dcp_async,
    "dcp reused": dcp_async_reused,
    "torchsnapshot": torchsnapshot_async,
    "torch_checkpointing": torch_checkpointing_steady,
    "lm-resiliency": lm_resiliency_save,
    "restore": restores,
    "replication": replication,
    "neighbour restore": neighbour_restore,
    "flush": flush,
}
KEYS = {
    "save_large_vs_memcpy": "save stall",
    "save_mix_vs_memcpy": "save stall",
    "save_small_vs_memcpy": "save stall",
    "save_overlapped_vs_memcpy": "save stall",
    "torch_save_fsync_vs_save": "torch.save",
    "torch_save_throttled_vs_save": "torch.save throttled",
    "dcp_async_vs_save": "dcp",
    "dcp_async_reused_vs_save": "dcp reused",
    "torchsnapshot_vs_save": "torchsnapshot",
    "torch_checkpointing_vs_save": "torch_checkpointing",
    "lm_resiliency_vs_save": "lm-resiliency",
    "restore_vs_memcpy": "restore",
    "torch_load_cached_vs_restore": "restore",
    "torch_load_throttled_vs_restore": "restore",
    "replicate_vs_pump": "replication",
    "neighbour_restore_vs_pump": "neighbour restore",
    "flush_vs_odirect": "flush",
}
"""Which part finds which ratio, in the order of the report."""
NEEDED = {"torchsnapshot": ["torchsnapshot"], "torch_checkpointing": ["torch_checkpointing"], "lm-resiliency": ["lm_resiliency"]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--restore"]:
        torch.set_num_threads(1)
        print(json.dumps(restore_once(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))))
    else:
        sys.exit(main())
