"""The demo's cluster and its faults, on real processes, namespaces and cgroups."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from eagleeye.errors import EnvironmentLacks, UsageError

DEMO = Path(__file__).parents[2] / "demo"

CHATTER = """
import os, socket, sys, threading, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host = os.environ["MASTER_ADDR"].rsplit(".", 1)[0]
port = int(os.environ["MASTER_PORT"]) + rank
print("rank", rank, "of", os.environ["EAGLEEYE_JOB"], "on", os.environ["EAGLEEYE_NODE"], flush=True)
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True:
    if "eth0" == os.environ["GLOO_SOCKET_IFNAME"]:
        for _ in range(5):
            sock.sendto(b"x" * 1000, (f"{host}.{(rank + 1) % size + 1}", 9))
    sum(range(20_000))
"""


def load(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, DEMO / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cluster = load("cluster")
faults = load("faults")
WHY_NOT = cluster.why_no_namespaces()
needs_namespaces = pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces: {WHY_NOT}")


@pytest.fixture
def chatter(tmp_path: Path) -> Path:
    """A stand-in for the job: busy, and sending, without torch's start-up time."""
    script = tmp_path / "chatter.py"
    script.write_text(CHATTER)
    return script


def wait_for(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def traces_of(cluster_id: str) -> list[str]:
    """Everything on this machine that carries the cluster's id."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    root = cluster.cgroup_root()
    found = [p.name for p in cluster.NETNS.glob(f"*{cluster_id}*")] + [p.name for p in cluster.STATE.glob(cluster_id)]
    found += [p.name for p in root.glob(f"*{cluster_id}*")] if root else []
    return found + [line for line in links.splitlines() if cluster_id in line]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def rank_pid(it: object, node: object) -> int:
    """The process of the rank on a node, once its launcher tells of it."""
    wait_for(lambda: it.pid(node) is not None)  # type: ignore[attr-defined]
    return int(it.pid(node))  # type: ignore[attr-defined]


def ready(it: object) -> bool:
    """Whether every rank has spoken, and its launcher tells of it."""
    return all(it.pid(n) for n in it.nodes) and all(  # type: ignore[attr-defined]
        b"rank %d of" % n.number in n.log.read_bytes()
        for n in it.nodes  # type: ignore[attr-defined]
    )


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def running(tmp_path: Path, chatter: Path) -> Iterator[object]:
    with cluster.Cluster(tmp_path / "run", 2, script=chatter, exporters=False, caches=False) as it:
        wait_for(lambda: ready(it))
        yield it


def node_output(node: object, *words: str) -> str:
    return subprocess.run(node.command(*words), capture_output=True, text=True, check=False).stdout  # type: ignore[attr-defined]


def received_bytes(node: object) -> int:
    return int(node_output(node, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))


@needs_namespaces
def test_namespaces_are_made_and_all_removed(tmp_path: Path, chatter: Path) -> None:
    with cluster.Cluster(tmp_path / "run", 3, script=chatter, exporters=False, caches=False) as it:
        wait_for(lambda: ready(it))
        pids = [rank_pid(it, node) for node in it.nodes]
        namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(namespaces) == 3
        assert os.readlink("/proc/self/ns/net") not in namespaces
        assert f"rank 1 of demo on node1-{it.id}" in it.nodes[1].log.read_text().splitlines()
        assert "eth0" in node_output(it.nodes[0], "ip", "-br", "link", "show", "up")
        wait_for(lambda: all(received_bytes(node) > 10_000 for node in it.nodes))
        assert traces_of(it.id)
        assert "own network namespace" in it.describe()
    assert traces_of(it.id) == []
    assert not any(alive(pid) for pid in pids)


@needs_namespaces
def test_management_port_reaches_the_node_when_its_fabric_is_cut(running: object) -> None:
    node = running.nodes[1]  # type: ignore[attr-defined]
    server = subprocess.Popen(
        node.command(sys.executable, "-m", "http.server", "--bind", node.exporter_address, str(node.exporter_port)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        wait_for(lambda: answers(node.exporter_url.removesuffix("metrics")))
        fault = faults.inject(running, "net", seed_for(running, 1), mode="cut")
        assert (fault.node, fault.rank) == (node.name, 1)
        assert node_output(node, "cat", "/sys/class/net/eth0/carrier") == "0\n"
        assert node_output(node, "cat", "/sys/class/net/mgmt0/carrier") == "1\n"
        assert answers(node.exporter_url.removesuffix("metrics"))
    finally:
        server.kill()
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def seed_for(it: object, rank: int) -> int:
    return next(seed for seed in range(100) if faults.choose(it, seed)[0].number == rank)


@needs_namespaces
def test_two_clusters_at_once_do_not_meet(tmp_path: Path, chatter: Path) -> None:
    with cluster.Cluster(tmp_path / "a", 2, script=chatter, exporters=False, caches=False) as first:
        with cluster.Cluster(tmp_path / "b", 2, script=chatter, exporters=False, caches=False) as second:
            assert len({node.exporter_url for it in (first, second) for node in it.nodes}) == 4
            second_id = second.id
        assert traces_of(second_id) == []
        assert all(alive(rank_pid(first, node)) for node in first.nodes)
        assert traces_of(first.id)


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import cluster
namespaces = None if sys.argv[4] == "auto" else False
with cluster.Cluster(Path(sys.argv[2]), 2, script=Path(sys.argv[3]), exporters=False, caches=False, namespaces=namespaces) as it:
    while not all(it.pid(n) for n in it.nodes):
        time.sleep(0.02)
    print(it.id, *(it.pid(n) for n in it.nodes), flush=True)
    time.sleep(60)
"""


def start_owner(tmp_path: Path, chatter: Path, namespaces: str) -> tuple[subprocess.Popen[str], str, list[int]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(DEMO), str(tmp_path / "run"), str(chatter), namespaces],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout
    cluster_id, *pids = owner.stdout.readline().split()
    owner.stdout.close()
    wait_for(lambda: all(b" of demo on " in p.read_bytes() for p in (tmp_path / "run").glob("*.log")))
    return owner, cluster_id, [int(pid) for pid in pids]


@needs_namespaces
def test_leftovers_of_a_killed_demo_go_at_the_next_start(tmp_path: Path, chatter: Path) -> None:
    owner, cluster_id, pids = start_owner(tmp_path, chatter, "auto")
    assert cluster_id not in cluster.remove_leftovers(), "its owner lives"
    assert all(alive(pid) for pid in pids)
    owner.kill()
    owner.wait()
    assert traces_of(cluster_id)
    with cluster.Cluster(tmp_path / "next", 2, script=chatter, exporters=False, caches=False):
        assert traces_of(cluster_id) == []
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(
    ("number", "namespaces"),
    [
        (signal.SIGTERM, "auto"),
        (signal.SIGINT, "none"),
        pytest.param(signal.SIGHUP, "auto", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "auto", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "none", marks=pytest.mark.slow),
    ],
)
def test_signals_end_everything(tmp_path: Path, chatter: Path, number: signal.Signals, namespaces: str) -> None:
    owner, cluster_id, pids = start_owner(tmp_path, chatter, namespaces)
    os.kill(pids[0], signal.SIGSTOP)
    owner.send_signal(number)
    assert owner.wait(20) in (128 + number, -number)
    assert not any(alive(pid) for pid in pids)
    if shutil.which("ip"):
        assert traces_of(cluster_id) == []


USER_NAMESPACE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import cluster
cluster.exporter_program = lambda: sys.argv[5]
print(cluster.why_no_namespaces(), flush=True)
cluster.enter_user_namespace()
with cluster.Cluster(Path(sys.argv[3]), 2, script=Path(sys.argv[4]), exporters=False, caches=False) as it:
    print(it.describe())
"""


def test_a_user_without_rights_gets_network_namespaces_in_a_user_namespace() -> None:
    python, nobody = sys.executable, []
    if os.getuid() == 0:
        python = shutil.which("python3", path="/usr/bin") or python
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    with tempfile.TemporaryDirectory() as folder:
        open_to_all = Path(folder)
        open_to_all.chmod(0o777)
        script = open_to_all / "chatter.py"
        script.write_text(CHATTER)
        program = open_to_all / "eagleeye"
        program.write_text(
            f"#!{python}\nimport sys\nsys.path.append({str(DEMO.parent)!r})\nfrom eagleeye.cli import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)
        can = [*nobody, python, "-c", f"import sys, os; sys.path.append({str(DEMO.parent)!r}); import enum; enum.StrEnum"]
        for needed in (can, [*nobody, "unshare", "-Urnm", "sh", "-c", "mount -t tmpfs tmpfs /run"]):
            if not shutil.which(needed[0]) or subprocess.run(needed, check=False, capture_output=True).returncode != 0:
                pytest.skip(f"does not work for users here: {needed[-1]}")
        done = subprocess.run(
            [
                *nobody,
                python,
                "-c",
                USER_NAMESPACE,
                str(DEMO),
                str(DEMO.parent),
                str(open_to_all / "run"),
                str(script),
                str(program),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stderr == ""
    first, started_again, last = done.stdout.splitlines()
    assert "may not make them" in first
    assert started_again == "None"
    assert "own network namespace" in last


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv (util-linux) is missing")
def test_ranks_on_loopback_die_with_a_killed_demo(tmp_path: Path, chatter: Path) -> None:
    owner, cluster_id, pids = start_owner(tmp_path, chatter, "none")
    owner.kill()
    owner.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    with cluster.Cluster(tmp_path / "next", 2, script=chatter, exporters=False, caches=False, namespaces=False):
        assert traces_of(cluster_id) == []


def test_an_exception_inside_leaves_nothing(tmp_path: Path, chatter: Path) -> None:
    it = cluster.Cluster(tmp_path / "run", 2, script=chatter, exporters=False, caches=False)
    before = signal.getsignal(signal.SIGTERM)
    pids: list[int] = []

    def work() -> None:
        with it:
            pids.extend(rank_pid(it, node) for node in it.nodes)
            raise RuntimeError("a mistake of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        work()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert signal.getsignal(signal.SIGTERM) is before


def test_kill_and_hang_act_on_the_chosen_rank(running: object) -> None:
    nodes = running.nodes  # type: ignore[attr-defined]
    stopped, dead = rank_pid(running, nodes[0]), rank_pid(running, nodes[1])
    hung = faults.inject(running, "hang", seed_for(running, 0))
    wait_for(lambda: state(stopped) == "T")
    killed = faults.inject(running, "kill", seed_for(running, 1))
    wait_for(lambda: not alive(dead))
    # whoever restarts it, this very process is not what runs again
    wait_for(lambda: "killed by SIGKILL" in "".join(node.log.read_text() for node in nodes) or "-9" in nodes[1].log.read_text())
    assert (hung.rank, killed.rank) == (0, 1)
    assert "SIGSTOP" in hung.how
    assert abs(killed.at_s - time.time()) < 5


def test_a_rank_that_does_not_run_cannot_be_broken(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text("print('done')")
    with cluster.Cluster(tmp_path / "run", 2, script=script, exporters=False, caches=False) as it:
        wait_for(lambda: all(node.launcher.poll() == 0 for node in it.nodes))
        with pytest.raises(EnvironmentLacks, match="rank 1 does not run"):
            faults.inject(it, "kill", seed_for(it, 1))


def cpu_share(it: object, node: object, seconds: float) -> float:
    before_s = faults._cpu_s(it, node)
    time.sleep(seconds)
    return (faults._cpu_s(it, node) - before_s) / seconds


@pytest.mark.slow
def test_slow_takes_cpu_time_from_one_rank(running: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MEASURE_S", 1.0)
    node = running.nodes[1]  # type: ignore[attr-defined]
    healthy = cpu_share(running, node, 1.0)
    faults.inject(running, "slow", seed_for(running, 1))
    if node.cgroup and (node.cgroup / "cpu.cfs_quota_us").exists():
        assert 1000 <= int((node.cgroup / "cpu.cfs_quota_us").read_text()) < 50_000
    elif node.cgroup:
        assert int((node.cgroup / "cpu.max").read_text().split()[0]) < 50_000
    assert cpu_share(running, node, 1.5) < 0.6 * healthy


@pytest.mark.slow
def test_slow_without_a_cgroup_alternates_stop_and_continue(running: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MEASURE_S", 1.0)
    node = running.nodes[0]  # type: ignore[attr-defined]
    cgroup, node.cgroup = node.cgroup, None
    try:
        fault = faults.inject(running, "slow", seed_for(running, 0))
        assert "SIGCONT" in fault.how
        wait_for(lambda: state(rank_pid(running, node)) == "T")
        wait_for(lambda: state(rank_pid(running, node)) != "T")
    finally:
        node.cgroup = cgroup


def test_cgroup_version_2_gets_quota_and_period(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000")
    assert faults.limit_cpu(tmp_path, 4711, 0.25)
    assert (tmp_path / "cgroup.procs").read_text() == "4711"
    assert (tmp_path / "cpu.max").read_text() == "25000 100000"
    assert not faults.limit_cpu(tmp_path / "absent", 4711, 0.25)


@pytest.mark.slow
@needs_namespaces
def test_net_limit_slows_what_the_node_sends(running: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MEASURE_S", 0.5)
    node, other = running.nodes  # type: ignore[attr-defined]

    def sent_in_a_second() -> int:
        before = faults._sent_bytes(running, node)
        time.sleep(1.0)
        return faults._sent_bytes(running, node) - before

    wait_for(lambda: received_bytes(other) > 1_000_000)
    healthy = sent_in_a_second()
    fault = faults.inject(running, "net", seed_for(running, 0), mode="limit")
    assert "MB/s" in fault.how
    assert "qdisc tbf" in node_output(node, "tc", "qdisc", "show", "dev", "eth0")
    assert "tbf" not in node_output(other, "tc", "qdisc", "show", "dev", "eth0")
    assert 0 < sent_in_a_second() < 0.7 * healthy


@needs_namespaces
@pytest.mark.skipif(not shutil.which("nft"), reason="nft (nftables) is missing")
def test_net_loss_drops_a_share_of_the_packets(running: object) -> None:
    faults.inject(running, "net", seed_for(running, 1), mode="loss")
    show = ["ip", "netns", "exec", running.switch, "nft", "list", "table", "netdev", "loss"]  # type: ignore[attr-defined]

    def rule() -> str:
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout

    assert 'device "port1"' in rule()
    wait_for(lambda: int(rule().partition("counter packets ")[2].split()[0]) > 10)


def test_loopback_says_so_and_refuses_network_faults(tmp_path: Path, chatter: Path) -> None:
    with cluster.Cluster(tmp_path / "run", 2, script=chatter, exporters=False, caches=False, namespaces=False) as it:
        assert "loopback (namespaces were switched off)" in it.describe()
        assert len({node.exporter_url for node in it.nodes}) == 2
        with pytest.raises(EnvironmentLacks, match="run it as root") as caught:
            faults.inject(it, "net", 0)
        assert caught.value.exit_code == 3
        with pytest.raises(UsageError, match="kill, hang, slow, net"):
            faults.inject(it, "flood", 0)


@pytest.mark.slow
def test_training_repeats_bit_for_bit_beside_files_named_like_packages(tmp_path: Path) -> None:
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    shutil.copy(DEMO / "train.py", script)
    for name in ("datasets", "remediation"):
        (script.parent / f"{name}.py").write_text("raise RuntimeError('the file of the user')\n")
    runs = []
    for attempt in ("first", "second"):
        words = ["--no-cache", "--steps", "3", "--batch-size", "2", "--context", "16"]
        with cluster.Cluster(tmp_path / attempt, 2, script=script, script_args=words, exporters=False, caches=False) as it:
            codes = [node.launcher.wait(90) for node in it.nodes]
            lines = [line.split(" ", 1)[1] for line in it.nodes[1].log.read_text().splitlines() if " loss " in line]
        assert codes == [0, 0], lines
        assert len(lines) == 3
        runs.append(lines)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("namespaces", [pytest.param(True, marks=needs_namespaces), pytest.param(False, marks=pytest.mark.slow)])
def test_each_exporter_shows_its_own_rank_and_no_shared_network(tmp_path: Path, chatter: Path, namespaces: bool) -> None:
    with cluster.Cluster(tmp_path / "run", 2, script=chatter, namespaces=namespaces) as it:
        for node in it.nodes:
            wait_for(lambda url=node.exporter_url: answers(url))
            wait_for(lambda url=node.exporter_url: "eagleeye_rank_info{" in page(url), 20)
            text = page(node.exporter_url)
            assert text.count("eagleeye_rank_info{") == 1
            assert f'node="{node.name}",pid="{rank_pid(it, node)}",rank="{node.number}"' in text
            assert ('device="eth0"' in text) == namespaces
        processes = [process for node in it.nodes for process in (node.exporter, node.cache, node.launcher)]
    assert all(process.returncode is not None for process in processes)


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read(), "utf-8")


def test_the_seed_decides_who_breaks(running: object) -> None:
    chosen = [faults.choose(running, seed) for seed in range(50)]
    assert chosen == [faults.choose(running, seed) for seed in range(50)]
    assert {node.number for node, _ in chosen} == {0, 1}
    assert {mode for _, mode in chosen} == set(faults.NET_MODES)
