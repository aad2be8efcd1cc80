"""`--watch`: real caches, launchers and scripts; a folder of each node that is kept, and put right after a node is lost."""

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.files import FolderClient
from checkpoint.listing import table
from checkpoint.manifest import Generation
from eagleeye.errors import DataError, UsageError
from eagleeye.records import to_json
from remediation.launcher.agent import Settings
from remediation.launcher.folder import FolderWatch, NotFit
from remediation.launcher.rounds import Job, Phase
from remediation.launcher.store import FolderStore

EAGLEEYE = [sys.executable, "-c", "import sys; from eagleeye.cli import main; sys.exit(main(sys.argv[1:]))"]

SCRIPT = """
import re, time
folder = Path(os.environ["HERE"])
rank = int(os.environ["RANK"])
found = sorted(folder.rglob("*.pt"), key=lambda p: int(re.findall(r"\\\\d+", str(p.relative_to(folder)))[0]))
start = found[-1].read_bytes() if found else b""
resumed = int(start.split(b" ")[1]) if start else 0
(Path(sys.argv[1]) / f"resumed-{me}").write_text(f"{resumed} {start.hex()[:80]}")

def name(step):
    return folder / (f"checkpoint_{step:06d}/rank{rank}.pt" if shape == "all" else f"step-{step}.pt")

def content(step):
    return b"step %d rank %d round %d " % (step, rank, round_) + os.urandom(50_000)

def save(step):
    if shape == "all" or rank == 0:
        path = name(step)
        path.parent.mkdir(exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_bytes(content(step))
        beside.rename(path)

def wait_for(name):
    while not (Path(sys.argv[1]) / name).exists():
        time.sleep(0.02)
"""
"""A script that resumes from the newest file of its own node's folder and saves when the test says so."""

SAVES_WHEN_TOLD = """
step = resumed
while True:
    step += 50
    wait_for(f"save-{step}-{round_}")
    save(step)
"""


class Caches:
    """The cache of each node, and the folder that a launcher there watches."""

    def __init__(self, fleet: Any, patch: pytest.MonkeyPatch) -> None:
        self.fleet, self.patch = fleet, patch
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def folder(self, node: str) -> Path:
        return Path(self.fleet.folder / node / "checkpoints")

    def start(self, node: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        home = self.fleet.folder / node
        home.mkdir(exist_ok=True)
        command = [*EAGLEEYE, "cache", "--node", node, "--address", "127.0.0.1", "--port", str(port)]
        with (home / "cache.log").open("ab") as log:
            self.processes[node] = subprocess.Popen([*command, "--run-dir", str(home / "run")], stdout=log, stderr=log)
        self.fleet.wait_for((home / "run" / "cache.json").exists)

    def launch(self, node: str, then: str, shape: str = "all", **more: Any) -> "subprocess.Popen[str]":
        self.patch.setenv("EAGLEEYE_CHECKPOINT__RUN_DIR", str(self.fleet.folder / node / "run"))
        self.patch.setenv("HERE", str(self.folder(node)))
        more = {"watch": str(self.folder(node)), "watch_quiet_s": 1.5, **more}
        return self.fleet.start(node, f"shape = {shape!r}" + SCRIPT.replace("\\\\", "\\") + then, **more)  # type: ignore[no-any-return]

    def start_all(self, then: str = SAVES_WHEN_TOLD, shape: str = "all", spares: int = 1, **more: Any) -> None:
        for n in range(3 + spares):
            self.start(f"node{n}")
        for n in range(3 + spares):
            self.launch(f"node{n}", then, shape, spare=n > 2, **more)
        self.fleet.wait_for_round(1, spares)

    def tell(self, step: int, number: int = 1) -> None:
        (self.fleet.folder / f"save-{step}-{number}").touch()

    def steps(self, node: str) -> list[int]:
        """Return the steps that the launcher of a node tells to have saved."""
        found = self.fleet.store.get(f"watch/{node}")
        return list(found[1]["steps"]) if found else []

    def wait_until_saved(self, step: int, nodes: int = 3) -> None:
        self.fleet.wait_for(lambda: all(step in self.steps(f"node{n}") for n in range(nodes)), 30.0)
        self.fleet.wait_for(lambda: all(self.has_copy(f"node{n}", step) for n in range(nodes)))

    def has_copy(self, node: str, step: int) -> bool:
        """Whether another node holds a copy of what the cache of a node was given."""
        rows = [line.split() for line in table(self.fleet.folder / node / "run").splitlines()]
        return any(row[:2] == ["j.files", str(step)] and row[3] == node and row[6] != "-" for row in rows)

    def lose(self, node: str) -> None:
        """End everything of a node as a broken machine does."""
        self.processes[node].kill()
        os.killpg(self.fleet.launchers[node].pid, signal.SIGKILL)

    def resumed(self, number: int, rank: int) -> int:
        self.fleet.wait_for((self.fleet.folder / f"resumed-round{number}-rank{rank}").exists)
        self.fleet.wait_for(lambda: (self.fleet.folder / f"resumed-round{number}-rank{rank}").read_text() != "")
        return int((self.fleet.folder / f"resumed-round{number}-rank{rank}").read_text().split()[0])

    def end(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@pytest.fixture
def caches(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caches]:
    made = Caches(fleet, monkeypatch)
    yield made
    made.end()


def tree(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files but ours, and those that were set aside."""
    ours = (".not-restored", *(f".watched-by-node{n}" for n in range(4)))
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and not set(ours) & set(p.parts)]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


@pytest.mark.slow
def test_all_nodes_write_and_a_spare_goes_on_from_what_the_lost_node_wrote(fleet: Any, caches: Caches) -> None:
    caches.start_all()
    for step in (50, 100):
        caches.tell(step)
        caches.wait_until_saved(step)
    kept = [tree(caches.folder(f"node{n}"))[f"checkpoint_000100/rank{n}.pt"] for n in range(3)]
    lost = next(n for n in (2, 1) if fleet.leader() != f"node{n}")
    # step 150 is written by those that survive only
    for n in range(3):
        if n != lost:
            path = caches.folder(f"node{n}") / f"checkpoint_000150/rank{n}.pt"
            path.parent.mkdir()
            path.write_bytes(b"step 150 " + os.urandom(1000))
    fleet.wait_for(lambda: all(150 in caches.steps(f"node{n}") for n in range(3) if n != lost))
    caches.lose(f"node{lost}")
    job = fleet.wait_for_round(2)
    assert job.members["node3"] == lost
    assert [caches.resumed(2, rank) for rank in range(3)] == [100, 100, 100]
    nodes = [f"node{3 if n == lost else n}" for n in range(3)]
    assert [tree(caches.folder(node))[f"checkpoint_000100/rank{n}.pt"] for n, node in enumerate(nodes)] == kept
    assert not any("000150" in path for node in nodes for path in tree(caches.folder(node)))
    assert re.search(r"watch: step 100 restored from neighbour node\d \(1 file, 50\.0 kB\)\n", fleet.log("node3"))
    other = next(n for n in range(3) if n != lost)
    sentence = r"watch: step 100 is in \S+ as it was saved \(1 file, 50\.0 kB\); 1 file of step 150 set aside in "
    sentence += r"\.not-restored/2-[0-9a-f]{8}, because not every node has that step\n"
    assert re.search(sentence, fleet.log(f"node{other}"))
    aside = list((caches.folder(f"node{other}") / ".not-restored").rglob("*.pt~"))
    assert [path.name for path in aside] == [f"rank{other}.pt~"]
    caches.tell(150, 2)
    for node in nodes:
        fleet.wait_for(lambda node=node: caches.steps(node) == [150])
    assert "Traceback" not in "".join(fleet.log(f"node{n}") for n in range(4))


@pytest.mark.slow
def test_only_the_first_node_writes_and_is_lost(fleet: Any, caches: Caches) -> None:
    caches.start_all(shape="first")
    caches.tell(50)
    fleet.wait_for(lambda: 50 in caches.steps("node0"))
    caches.tell(100)
    caches.wait_until_saved(100)
    assert [caches.steps(f"node{n}") for n in range(3)] == [[50, 100]] * 3
    kept = tree(caches.folder("node0"))["step-100.pt"]
    caches.lose("node0")
    job = fleet.wait_for_round(2)
    assert job.members["node3"] == 0
    assert caches.resumed(2, 0) == 100
    assert tree(caches.folder("node3")) == {"step-100.pt": kept}
    assert [tree(caches.folder(f"node{n}")) for n in (1, 2)] == [{}, {}]
    assert "watch: step 100: this node has no files of it" in fleet.log("node1")


HALF = """
step = resumed
while True:
    step += 50
    wait_for(f"save-{step}-{round_}")
    if step < 100 or round_ > 1 or rank != 1:
        save(step)
    else:
        path = name(step)
        path.parent.mkdir(exist_ok=True)
        file = path.open("wb")
        file.write(content(step))
        file.flush()
        (Path(sys.argv[1]) / "half").touch()
        time.sleep(600)
"""


@pytest.mark.slow
def test_a_file_half_written_at_the_kill_is_never_restored(fleet: Any, caches: Caches) -> None:
    caches.start_all(HALF, spares=0, verdict_wait_s=3.0)
    fleet.store.put("watcher", {"beat": 1}, 0)  # so that the other ranks are left alone for a while
    caches.tell(50)
    caches.wait_until_saved(50)
    caches.tell(100)
    fleet.wait_for((fleet.folder / "half").exists)
    time.sleep(3.0)  # longer than it takes to believe that a file is complete; so is the wait for a verdict after the kill
    assert [caches.steps(f"node{n}") for n in range(3)] == [[50, 100], [50], [50, 100]]
    os.kill(fleet.pid(1, 1), signal.SIGKILL)
    fleet.wait_for_round(2)
    assert [caches.resumed(2, rank) for rank in range(3)] == [50, 50, 50]
    assert [list(tree(caches.folder(f"node{n}"))) for n in range(3)] == [[f"checkpoint_000050/rank{n}.pt"] for n in range(3)]
    assert [caches.steps(f"node{n}") for n in range(3)] == [[], [], []]


@pytest.mark.slow
def test_torch_save_and_a_file_named_latest(fleet: Any, caches: Caches) -> None:
    pytest.importorskip("torch")
    script = """
import torch
folder = Path(os.environ["HERE"])
rank = int(os.environ["RANK"])
(Path(sys.argv[1]) / f"begun-{me}").touch()
latest = folder / "latest"
state = torch.load(folder / latest.read_text(), weights_only=True) if latest.exists() else {"step": 0, "w": torch.zeros(4096)}
(Path(sys.argv[1]) / f"resumed-{me}").write_text(f"{state['step']} {float(state['w'].sum())}")
while True:
    step = state["step"] + 50
    while not (Path(sys.argv[1]) / f"save-{step}-{round_}").exists():
        time.sleep(0.05)
    state = {"step": step, "w": state["w"] + rank + 1}
    torch.save(state, folder / f"model-{step}-rank{rank}.pt")
    latest.write_text(f"model-{step}-rank{rank}.pt")
"""
    for n in range(4):
        caches.start(f"node{n}")
    for n in range(4):
        caches.patch.setenv("EAGLEEYE_CHECKPOINT__RUN_DIR", str(fleet.folder / f"node{n}" / "run"))
        caches.patch.setenv("HERE", str(caches.folder(f"node{n}")))
        fleet.start(f"node{n}", script, spare=n > 2, watch=str(caches.folder(f"node{n}")), watch_quiet_s=1.5)
    fleet.wait_for(lambda: all((fleet.folder / f"resumed-round1-rank{rank}").exists() for rank in range(3)), 60.0)
    for step in (50, 100):
        caches.tell(step)
        caches.wait_until_saved(step)
    lost = next(n for n in (2, 1) if fleet.leader() != f"node{n}")
    caches.lose(f"node{lost}")
    fleet.wait_for_round(2)
    fleet.wait_for(lambda: all((fleet.folder / f"resumed-round2-rank{rank}").exists() for rank in range(3)), 60.0)
    sums = [(fleet.folder / f"resumed-round2-rank{rank}").read_text() for rank in range(3)]
    assert sums == [f"100 {4096.0 * 2 * (rank + 1)}" for rank in range(3)]
    assert sorted(tree(caches.folder("node3"))) == ["latest", f"model-100-rank{lost}.pt"]


@pytest.mark.slow
def test_a_file_that_comes_late_spoils_its_step(fleet: Any, caches: Caches) -> None:
    caches.start_all(spares=0)
    caches.tell(50)
    caches.wait_until_saved(50)
    caches.tell(100)
    caches.wait_until_saved(100)
    (caches.folder("node1") / "checkpoint_000100" / "optimizer.pt").write_bytes(b"too late")
    fleet.wait_for(lambda: "watch: step 100 does not count: checkpoint_000100/optimizer.pt came" in fleet.log("node1"))
    (caches.folder("node2") / "checkpoint_000050" / "rank2.pt").write_bytes(b"changed")
    fleet.wait_for(lambda: "a file of step 50 was changed after it was saved" in fleet.log("node2"))
    os.kill(fleet.pid(1, 0), signal.SIGKILL)
    fleet.wait_for_round(2)
    assert [caches.resumed(2, rank) for rank in range(3)] == [50, 50, 50]
    assert fleet.log("node2").count("was changed after it was saved") == 1
    assert tree(caches.folder("node2"))["checkpoint_000050/rank2.pt"].startswith(b"step 50 rank 2 round 1 ")
    aside = [p.read_bytes() for p in (caches.folder("node2") / ".not-restored").rglob("checkpoint_000050~/*")]
    assert aside == [b"changed"]
    assert "1 file set aside in .not-restored/2-" in fleet.log("node2")
    assert "1 file of step 100 set aside in .not-restored/2-" in fleet.log("node2")


@pytest.mark.slow
def test_a_step_that_does_not_count_never_does(fleet: Any, caches: Caches) -> None:
    """Also when the job is started again by hand, for which the launchers' documents are removed."""
    caches.start_all(spares=0)
    for step in (50, 100):
        caches.tell(step)
        caches.wait_until_saved(step)
    (caches.folder("node1") / "checkpoint_000100" / "optimizer.pt").write_bytes(b"too late")
    fleet.wait_for(lambda: "watch: step 100 does not count" in fleet.log("node1"))
    fleet.wait_for(lambda: (fleet.store.get("watch/node1") or (0, {"spoiled": ()}))[1]["spoiled"])
    for launcher in fleet.launchers.values():
        launcher.terminate()
    fleet.codes("node0", "node1", "node2")
    shutil.rmtree(fleet.rendezvous / "j")
    for path in (*fleet.folder.glob("round1-*"), *fleet.folder.glob("resumed-*")):
        path.unlink()
    for n in range(3):
        caches.launch(f"node{n}", SAVES_WHEN_TOLD)
    fleet.wait_for_round(1)
    assert [caches.resumed(1, rank) for rank in range(3)] == [50, 50, 50]


def test_a_job_whose_only_good_step_is_damaged_is_not_started_anew(fleet: Any, caches: Caches) -> None:
    """Not even if a newer step is known that does not count."""
    caches.start("n")
    caches.patch.setenv("EAGLEEYE_CHECKPOINT__RUN_DIR", str(fleet.folder / "n" / "run"))
    good, spoiled = (Generation(7, step, "abcdef00") for step in (50, 100))
    (fleet.folder / "step-50.pt").write_bytes(b"of step 50" * 1000)
    client = FolderClient("j.files", 0, 1)
    for generation in (good, spoiled):
        client.save(generation, fleet.folder, {"step-50.pt": (fleet.folder / "step-50.pt").lstat()})
    fleet.wait_for(lambda: client.choose().generation == str(spoiled))
    client.close()
    for file in Path(f"/proc/{caches.processes['n'].pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of a connection that has just ended
            if "eagleeye-slab" in os.readlink(file):
                with file.open("r+b") as memory:
                    memory.write(b"flipped")
    folder = fleet.folder / "watched"
    folder.mkdir()
    (folder / ".watched-by-n").write_text(f"{spoiled}\n")
    job = Job("j", 1, 1, 1, round=1, phase=Phase.RUNNING, members={"n": 0})
    assert fleet.store.put("job", to_json(job), 0)
    watch = FolderWatch(folder, Settings().watch_step, 5.0, "j", "n", FolderStore(fleet.rendezvous / "j"), print)
    with pytest.raises(DataError, match=r"there was a checkpoint of step 50 and nothing can be restored \(step 50: .* not those"):
        watch.before_round(1, {"n": 0})
    watch.end()


@pytest.mark.slow
def test_a_node_whose_cache_is_gone_leaves_and_the_spare_takes_over(fleet: Any, caches: Caches) -> None:
    caches.start_all()
    caches.tell(50)
    caches.wait_until_saved(50)
    caches.processes["node1"].kill()
    os.kill(fleet.pid(1, 1), signal.SIGKILL)
    assert fleet.codes("node1", seconds=30.0) == [3]
    assert "this node is not fit: the checkpoint cache at " in fleet.log("node1")
    fleet.wait_for(lambda: fleet.job().members.get("node3") == 1, 30.0)
    again = fleet.job().round
    fleet.wait_for((fleet.folder / f"resumed-round{again}-rank1").exists, 30.0)
    assert [caches.resumed(again, rank) for rank in range(3)] == [50, 50, 50]


@pytest.mark.slow
def test_a_spare_without_room_leaves_and_nothing_is_half_written(fleet: Any, caches: Caches) -> None:
    caches.start_all()
    caches.tell(50)
    caches.wait_until_saved(50)
    limits = resource.prlimit(fleet.launchers["node3"].pid, resource.RLIMIT_FSIZE)
    resource.prlimit(fleet.launchers["node3"].pid, resource.RLIMIT_FSIZE, (20_000, limits[1]))  # as a full disk
    caches.lose("node1")  # whose copy is on node2: a cache whose launcher left the job is not asked
    assert fleet.codes("node3", seconds=30.0) == [3]
    sentence = r"this node is not fit: cannot write \S+/checkpoint_000050/rank1\.pt: File too large; "
    assert re.search(sentence + r"make \S+ writable, with room for it\n", fleet.log("node3"))
    assert "Traceback" not in fleet.log("node3")
    assert [path.name for path in caches.folder("node3").rglob("*")] == [".watched-by-node3"]
    fleet.wait_for(lambda: fleet.job().phase is Phase.FORMING)
    caches.start("node4")
    caches.launch("node4", SAVES_WHEN_TOLD, spare=True)
    fleet.wait_for(lambda: fleet.job().members.get("node4") == 1, 30.0)
    fleet.wait_for_round(fleet.job().round)
    assert caches.resumed(fleet.job().round, 1) == 50


@pytest.mark.slow
def test_what_lies_in_the_folder_before_is_left_alone(fleet: Any, caches: Caches) -> None:
    for n in range(3):
        caches.folder(f"node{n}").mkdir(parents=True)
        (caches.folder(f"node{n}") / "step-700.pt").write_bytes(b"step 700 of another run")
    caches.start_all(spares=0)
    assert [caches.resumed(1, rank) for rank in range(3)] == [700, 700, 700]
    time.sleep(3.0)  # longer than watch_quiet_s: nobody knows whether these files are complete, so they are not kept
    assert [caches.steps(f"node{n}") for n in range(3)] == [[], [], []]
    sentence = r"watch: no step was ever saved by every node; \S+ is left as it is \(1 file\)\n"
    assert all(re.search(sentence, fleet.log(f"node{n}")) for n in range(3))
    os.kill(fleet.pid(1, 0), signal.SIGKILL)
    fleet.wait_for_round(2)
    assert [caches.resumed(2, rank) for rank in range(3)] == [700, 700, 700]
    assert [caches.steps(f"node{n}") for n in range(3)] == [[], [], []]


@pytest.mark.slow
def test_a_job_that_is_started_again_by_hand_goes_on_where_it_was(fleet: Any, caches: Caches) -> None:
    caches.start_all(spares=0)
    caches.tell(50)
    caches.wait_until_saved(50)
    kept = tree(caches.folder("node1"))
    for launcher in fleet.launchers.values():
        launcher.terminate()
    fleet.codes("node0", "node1", "node2")
    shutil.rmtree(fleet.rendezvous / "j")
    shutil.rmtree(caches.folder("node1"))
    for path in (*fleet.folder.glob("round1-*"), *fleet.folder.glob("resumed-*")):
        path.unlink()
    for n in range(3):
        caches.launch(f"node{n}", SAVES_WHEN_TOLD)
    fleet.wait_for_round(1)
    assert [caches.resumed(1, rank) for rank in range(3)] == [50, 50, 50]
    assert tree(caches.folder("node1")) == kept
    assert "watch: step 50 restored from this node's memory (1 file, 50.0 kB)\n" in fleet.log("node1")


HANGS = """
step = resumed
while True:
    step += 50
    wait_for(f"save-{step}-{round_}")
    if rank != 1:
        save(step)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_before_its_first_file_is_none_that_writes_none(fleet: Any, caches: Caches) -> None:
    caches.start_all(HANGS, spares=0)
    caches.tell(50)
    fleet.wait_for(lambda: all(50 in caches.steps(f"node{n}") for n in (0, 2)))
    time.sleep(3.0)  # longer than watch_quiet_s
    assert caches.steps("node1") == []
    os.kill(fleet.pid(1, 1), signal.SIGKILL)
    fleet.wait_for_round(2)
    assert [caches.resumed(2, rank) for rank in range(3)] == [0, 0, 0]
    assert [tree(caches.folder(f"node{n}")) for n in range(3)] == [{}, {}, {}]
    sentence = r"watch: no step was ever saved by every node; 1 file of step 50 set aside in \.not-restored/2-"
    assert all(re.search(sentence, fleet.log(f"node{n}")) for n in (0, 2))


def test_no_cache_no_rank(fleet: Any, caches: Caches) -> None:
    assert caches.launch("node0", "").wait(20) == 3
    assert re.fullmatch(
        r"eagleeye launch: --watch keeps files in the cache of this node, and no cache answers in \S+/node0/run "
        r"\(No such file or directory\); start `eagleeye cache` on this node\n",
        fleet.log("node0"),
    )
    assert list(fleet.folder.glob("round*")) == []


def test_nodes_that_share_the_folder(fleet: Any, caches: Caches) -> None:
    for n in range(3):
        caches.start(f"node{n}")
    for n in range(3):
        caches.launch(f"node{n}", "", watch=str(caches.folder("node0")))
    fleet.wait_for(lambda: any(process.poll() == 3 for process in fleet.launchers.values()))
    told = "".join(fleet.log(f"node{n}") for n in range(3))
    sentence = r"this node is not fit: \S+/node0/checkpoints is watched by node\d, too; --watch needs a folder that each node has"
    assert re.search(sentence, told)
    assert list(fleet.folder.glob("round*")) == []


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("step-100.pt", 100),
        ("checkpoint_000100/rank3.pt", 100),
        ("checkpoint_000100/model_7.pt", 100),
        ("model-100-rank3.pt", 100),
        ("global_step100/mp_rank_00_model_states.pt", 100),
        ("rank_3/step-100.pt", 100),
        ("epoch=3-step=100.ckpt", 100),
        ("weights.100", 100),
        ("model-100.h5", 100),
        ("latest", None),
        ("rank3.pt", None),
        ("rank3/last.h5", None),
        ("model-9999999999999.pt", None),
    ],
)
def test_the_step_of_a_file(fleet: Any, caches: Caches, path: str, step: int | None) -> None:
    assert watch(fleet, caches).step(path) == step


def test_a_pattern_of_the_users_own(fleet: Any, caches: Caches) -> None:
    made = watch(fleet, caches, r"it(\d+)")
    assert (made.step("run2/it30-v1.pt"), made.step("run2/v1.pt")) == (30, None)
    with pytest.raises(UsageError, match=r"^--watch: the pattern .* must have one group, the step$"):
        watch(fleet, caches, r"it\d+")
    with pytest.raises(UsageError, match=r"^--watch: "):
        watch(fleet, caches, r"it(\d+")


def watch(fleet: Any, caches: Caches, pattern: str = Settings().watch_step) -> FolderWatch:
    """Return a watch that was not begun, with a socket that listens where the cache would."""
    run = fleet.folder / "run"
    caches.patch.setenv("EAGLEEYE_CHECKPOINT__RUN_DIR", str(run))
    run.mkdir(exist_ok=True)
    (run / "cache.sock").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listens:
        listens.bind(str(run / "cache.sock"))
        listens.listen()
        return FolderWatch(fleet.folder / "watched", pattern, 5.0, "j", "n", FolderStore(fleet.rendezvous / "j"), print)


def test_a_folder_that_is_none(fleet: Any, caches: Caches) -> None:
    (fleet.folder / "watched").write_text("a file")
    with pytest.raises(UsageError, match="watched cannot be used as a folder: File exists"):
        watch(fleet, caches)
    caches.patch.setenv("EAGLEEYE_CHECKPOINT__RUN_DIR", str(fleet.folder / "nowhere"))
    with pytest.raises(NotFit, match="start `eagleeye cache`"):
        FolderWatch(fleet.folder, r"(\d+)", 5.0, "j", "n", FolderStore(fleet.rendezvous / "j"), print)


def test_a_job_that_may_shrink_cannot_be_watched() -> None:
    with pytest.raises(ValueError, match="min_nodes must be 0"):
        Settings(nodes=3, min_nodes=2, watch="/x")
