"""Makes a cluster on one machine: each node a network namespace, a CPU cgroup, an exporter, a cache, a launcher for one rank.

With root rights a node has `eth0`, its port to the fabric on which the job talks, and `mgmt0`, over which the exporter is
scraped and which no fault touches, as real clusters keep management apart. The fabric's bridge lives in a namespace of its
own, so that neither the machine's firewall nor its addresses can meet it. Without rights all ranks share loopback.
"""

import dataclasses
import fcntl
import ipaddress
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

from eagleeye.clock import SystemClock, monotonic_s
from eagleeye.collect.base import BUILT_IN
from eagleeye.errors import EnvironmentLacks
from remediation.launcher.store import FolderStore

TRAIN = Path(__file__).with_name("train.py")
STATE = Path("/run/eagleeye-demo")
"""One locked file per living cluster. The kernel drops the lock of a dead owner: its namespaces and cgroups are leftovers."""
NETNS = Path("/run/netns")
MANAGEMENT = ipaddress.ip_network("198.18.0.0/15")
"""Reserved for benchmarks by RFC 2544, so hardly ever routed; each cluster takes a free /24 of it."""
EXPORTER_PORT = 9400
CACHE_PORT = 9480
ISOLATING = ("memory", "blkio")
"""Controllers whose cgroups isolated nodes have beside that of the CPU."""
DISK_BYTES = 16 << 20
STOP_S = 8.0
"""Launchers need a while to end their ranks in order."""


@dataclasses.dataclass(slots=True)
class Node:
    """One node. `namespace`, `switch_port` are None on loopback, `cgroup` is None where no CPU controller is writable.

    `number` is the rank that the node holds at first; a spare holds none. `log` is what launcher and ranks say. `disk` is where
    the node's own file system is mounted; it and the last two cgroups, which hold the rank, only isolated clusters have.
    """

    name: str
    number: int
    spare: bool
    log: Path
    fabric_address: str
    exporter_address: str
    exporter_port: int
    cache_port: int
    namespace: str | None = None
    switch_port: str | None = None
    cgroup: Path | None = None
    disk: Path | None = None
    memory_cgroup: Path | None = None
    blkio_cgroup: Path | None = None
    launcher: subprocess.Popen[bytes] | None = None
    exporter: subprocess.Popen[bytes] | None = None
    cache: subprocess.Popen[bytes] | None = None

    @property
    def exporter_url(self) -> str:
        """Where the exporter is scraped, from outside the node."""
        return f"http://{self.exporter_address}:{self.exporter_port}/metrics"

    def command(self, *words: str) -> list[str]:
        """Return `words` as a command line that runs inside the node's network namespace."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else list(words)


class Cluster:
    """A context manager: entering makes the nodes and starts the job, leaving ends and removes everything.

    Enter it in the main thread: while it is open SIGTERM and SIGHUP end the program as Ctrl-C does, by an exception.

    Parameters
    ----------
    run_dir : folder for the logs ``NODE.log`` and whatever the exporters keep
    nodes : how many, each with one rank
    spares : how many more, each ready to take a node's place
    namespaces : True demands them, False forbids them, None takes them where rights allow
    script : the training script, started with `script_args` in the script's folder
    exporters : whether each node also runs ``eagleeye export``
    caches : whether each node also runs ``eagleeye cache``
    isolated : whether each node also has a disk of its own, ``disks/NODE`` in `run_dir`, and cgroups for memory and block I/O

    Raises
    ------
    EnvironmentLacks
        Namespaces or isolation were demanded and cannot be made, or the `eagleeye` command is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        nodes: int = 4,
        *,
        spares: int = 0,
        namespaces: bool | None = None,
        script: Path = TRAIN,
        script_args: Sequence[str] = (),
        job: str = "demo",
        exporters: bool = True,
        caches: bool = True,
        isolated: bool = False,
    ) -> None:
        if nodes < 2 or spares < 0 or nodes + spares > 60:
            raise ValueError(f"a cluster has 2 to 60 nodes, not {nodes} and {spares} spares")
        self.run_dir = run_dir.resolve()
        self.job = job
        self.id = secrets.token_hex(3)
        self.nodes: list[Node] = []
        self._count, self._spares = nodes, spares
        self._script, self._script_args = script.resolve(), tuple(script_args)
        self._exporters, self._caches, self._isolated = exporters, caches, isolated
        self._why_loopback = "namespaces were switched off" if namespaces is False else why_no_namespaces()
        if namespaces and self._why_loopback:
            raise EnvironmentLacks(f"cannot make network namespaces: {self._why_loopback}; leave out the demand or run as root")
        self._lock: int | None = None
        self._handlers: dict[signal.Signals, object] = {}

    @property
    def ranks(self) -> int:
        """How many ranks the job has."""
        return self._count

    @property
    def switch(self) -> str | None:
        """Namespace of the fabric's bridge, None on loopback."""
        return None if self._why_loopback else f"eagleeye-{self.id}-switch"

    def describe(self) -> str:
        """Say in one sentence what the nodes are made of and what that means for the signals."""
        if self._why_loopback:
            return (
                f"All {len(self.nodes)} nodes share this machine's loopback ({self._why_loopback}), so only the counters of each "
                "process tell them apart and network faults cannot be made."
            )
        cpu = "its own CPU cgroup" if all(n.cgroup for n in self.nodes) else "no CPU cgroup of its own"
        return (
            f"Each of the {len(self.nodes)} nodes has its own network namespace on this machine, with a fabric port eth0, "
            f"a management port mgmt0 and {cpu}."
        )

    def __enter__(self) -> "Cluster":
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _leave)
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Make the nodes and start ranks and exporters; returns before the job's first step."""
        progress_dir, storage = self.run_dir / "progress", self.run_dir / "storage"
        for folder in (progress_dir, storage, self.rendezvous):
            folder.mkdir(parents=True, exist_ok=True)
        self._make_nodes()
        # On loopback the network's counters are the machine's: no node may show them as its own.
        collectors = [name for name in BUILT_IN if self.switch or name != "network"]
        for node in self.nodes:
            node.log.write_bytes(b"")
            if self._exporters:
                node.exporter = self._spawn(
                    node,
                    [exporter_program(), "export"],
                    node.log.with_suffix(".exporter"),
                    self.run_dir,
                    EAGLEEYE_COLLECT__NODE=node.name,
                    EAGLEEYE_COLLECT__ADDRESS=node.exporter_address,
                    EAGLEEYE_COLLECT__PORT=str(node.exporter_port),
                    EAGLEEYE_COLLECT__RUN_DIR=str(progress_dir),
                    EAGLEEYE_COLLECT__LOGS=str(node.log),
                    EAGLEEYE_COLLECT__COLLECTORS=",".join(collectors),
                )
            if self._caches:
                where = ["--address", node.fabric_address, "--port", str(node.cache_port), "--storage", str(storage)]
                node.cache = self._spawn(
                    node,
                    [exporter_program(), "cache", "--node", node.name, "--run-dir", str(self._cache_dir(node)), *where],
                    node.log.with_suffix(".cache"),
                    self.run_dir,
                )
        for node in self.nodes:
            node.launcher = self._spawn(
                node,
                [
                    exporter_program(),
                    "launch",
                    *self._launch_options(node),
                    "--",
                    *_entering(node),
                    sys.executable,
                    "-u",
                    str(self._script),
                    *self._script_args,
                ],
                node.log,
                self._script.parent,
                GLOO_SOCKET_IFNAME="eth0" if self.switch else loopback(),
                EAGLEEYE_RUN_DIR=str(progress_dir),
                EAGLEEYE_CHECKPOINT__RUN_DIR=str(self._cache_dir(node)),
                EAGLEEYE_REMEDIATION__LAUNCHER__GRACE_S="6",
            )

    @property
    def rendezvous(self) -> Path:
        """The folder in which the launchers meet."""
        return self.run_dir / "rendezvous"

    @property
    def disks(self) -> Path:
        """The folder in which the disks of an isolated cluster's nodes are mounted."""
        return self.run_dir / "disks"

    def pid(self, node: Node) -> int | None:
        """Return the process of the rank on `node`, None when it has none now."""
        told = FolderStore(self.rendezvous / self.job).get(f"agents/{node.name}")
        pids = told[1].get("pids") if told else None
        return int(pids[0]) if pids else None

    def _cache_dir(self, node: Node) -> Path:
        return self.run_dir / "caches" / node.name

    def _launch_options(self, node: Node) -> list[str]:
        meeting = ["--job", self.job, "--rendezvous", str(self.rendezvous), "--nodes", str(self._count)]
        return [*meeting, "--node", node.name, "--address", node.fabric_address, *(["--spare"] if node.spare else [])]

    def stop(self) -> None:
        """End every process and remove every namespace and cgroup. Safe to repeat; a second Ctrl-C cannot interrupt it."""
        with _uninterrupted():
            thaw_below(self.disks)  # not even SIGKILL ends a process that writes to a frozen disk
            # the launchers first: they end their ranks
            end([n.launcher for n in self.nodes if n.launcher])
            end([p for n in self.nodes for p in (n.exporter, n.cache) if p])
            if self._lock is not None:
                remove(self.id)
                (STATE / self.id).unlink(missing_ok=True)
                os.close(self._lock)
                self._lock = None
            unmount_below(self.disks)
            self.nodes = []
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers = {}

    def _make_nodes(self) -> None:
        for number in range(self._count + self._spares):
            # Exporters see the processes of the whole machine and tell their node's ranks by its name: no other demo may have it.
            name = f"node{number}-{self.id}"
            log = self.run_dir / f"{name}.log"
            spare = number >= self._count
            self.nodes.append(Node(name, number, spare, log, "127.0.0.1", "127.0.0.1", EXPORTER_PORT, CACHE_PORT))
        if os.access(STATE.parent, os.W_OK):
            with _setup_lock():
                remove_leftovers()
                self._lock = os.open(STATE / self.id, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                for node in self.nodes:
                    node.cgroup = make_cgroup(f"eagleeye-{self.id}-node{node.number}")
                    if self._isolated:
                        self._isolate(node)
                if self.switch:
                    self._make_network(self.switch)
        if not self.switch:
            ports = iter(free_ports(2 * len(self.nodes)))
            for node in self.nodes:
                node.exporter_port, node.cache_port = next(ports), next(ports)

    def _isolate(self, node: Node) -> None:
        name = f"eagleeye-{self.id}-node{node.number}"
        node.memory_cgroup, node.blkio_cgroup = make_cgroup(name, "memory"), make_cgroup(name, "blkio")
        if not (node.memory_cgroup and node.blkio_cgroup):
            raise EnvironmentLacks("nodes cannot be isolated: no cgroups of version 1 for memory and blkio can be made here")
        node.disk = make_disk(self.disks / node.name)

    def _make_network(self, switch: str) -> None:
        management = free_management_net()
        ip(f"netns add {switch}")
        lines = ["link add fabric type bridge", "link set fabric up"]
        for node, pair in zip(self.nodes, management.subnets(new_prefix=30), strict=False):
            ours, theirs = pair.hosts()
            node.namespace, node.switch_port = f"eagleeye-{self.id}-node{node.number}", f"port{node.number}"
            node.fabric_address, node.exporter_address = f"10.0.0.{node.number + 1}", str(theirs)
            host_end = f"ee{self.id}m{node.number}"
            ip(f"netns add {node.namespace}")
            ip(f"link add {host_end} type veth peer name mgmt0 netns {node.namespace}")
            ip(f"address add {ours}/30 dev {host_end}", f"link set {host_end} up")
            ip(
                "link set lo up",
                f"link add eth0 type veth peer name {node.switch_port} netns {switch}",
                f"address add {node.fabric_address}/24 dev eth0",
                f"address add {theirs}/30 dev mgmt0",
                "link set eth0 up",
                "link set mgmt0 up",
                namespace=node.namespace,
            )
            lines += [f"link set {node.switch_port} master fabric up"]
            # What a lost packet costs depends on it, and machines differ; where the kernel lacks it its own choice stays.
            subprocess.run(
                node.command("sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic"), check=False, stderr=subprocess.DEVNULL
            )
        ip(*lines, namespace=switch)

    def _spawn(self, node: Node, command: list[str], output: Path, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
        if shutil.which("setpriv"):
            # Should this process be killed outright, the kernel ends its children: no job is left to burn the machine.
            command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
        with output.open("ab") as file:
            return subprocess.Popen(
                node.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | environment,
                process_group=0,
            )


def _entering(node: Node) -> list[str]:
    """Return a command that starts another one inside the node's cgroups, where memory is charged from the first byte on."""
    # `ip netns exec` hides the cgroups from the node by a /sys of its own
    files = [f"/proc/{os.getpid()}/root{cgroup}/cgroup.procs" for cgroup in (node.memory_cgroup, node.blkio_cgroup) if cgroup]
    if not files:
        return []
    return ["sh", "-ec", "".join(f"echo $$ > {shlex.quote(file)}; " for file in files) + 'exec "$@"', "sh"]


def exporter_program() -> str:
    """Return the path of the `eagleeye` command of this environment.

    Raises
    ------
    EnvironmentLacks
        It is not installed.
    """
    program = Path(sysconfig.get_path("scripts")) / "eagleeye"
    if not program.exists():
        raise EnvironmentLacks(f"there is no {program}; install the project into this environment first: make venv")
    return str(program)


def why_no_namespaces() -> str | None:
    """Return what keeps this process from making network namespaces, None when nothing does."""
    if not sys.platform.startswith("linux"):
        return "only Linux has network namespaces"
    if not shutil.which("ip"):
        return "the command ip is missing (package iproute2)"
    probe = f"eagleeye-{secrets.token_hex(3)}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        made = subprocess.run(
            ["ip", "-n", probe, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1"],
            capture_output=True,
            text=True,
            check=False,
        )
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return None if made.returncode == 0 else f"this user may not make them: {made.stderr.strip().splitlines()[-1]}"


def enter_user_namespace() -> None:
    """Start this program again as root of a user namespace of its own, where that gives a user without rights namespaces.

    Returns when that is not needed or not possible. The program started again has no network but its own nodes. Call it first
    in `main`, before any thread or file is open.
    """
    if why_no_namespaces() is None or not shutil.which("unshare") or not shutil.which("ip"):
        return
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-ec"]
    prepare = "mount -t tmpfs tmpfs /run; mkdir /run/netns; ip link set lo up; ip netns add probe; ip netns del probe; "
    if subprocess.run([*unshare, prepare], capture_output=True, check=False).returncode == 0:
        os.execvp(unshare[0], [*unshare, prepare + 'exec "$@"', "sh", sys.executable, *sys.orig_argv[1:]])


def remove_leftovers() -> list[str]:
    """Remove what clusters left behind whose owner was killed; return their ids. Clusters of living owners stay."""
    dead = []
    for path in sorted(STATE.glob("*")):
        handle = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove(path.name)
            path.unlink()
            dead.append(path.name)
        finally:
            os.close(handle)
    return dead


def remove(cluster_id: str) -> None:
    """Remove the namespaces (with their links), the processes inside and the cgroups of one cluster."""
    names = [path.name for path in NETNS.glob(f"eagleeye-{cluster_id}-*")]
    for name in names:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in names:
        # A namespace lives on while a socket in it lingers, and its links with it: remove the links by name.
        for link in ("eth0", "mgmt0"):
            subprocess.run(["ip", "-n", name, "link", "del", link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    for root in filter(None, {cgroup_root(), *(cgroup_v1_root(controller) for controller in ISOLATING)}):
        for path in root.glob(f"eagleeye-{cluster_id}-*"):
            _remove_cgroup(path)


def ip(*commands: str, namespace: str | None = None) -> None:
    """Run commands of iproute2 in one batch.

    Raises
    ------
    EnvironmentLacks
        One of them failed.
    """
    where = ["-n", namespace] if namespace else []
    done = subprocess.run(
        ["ip", *where, "-batch", "-"], input="\n".join(commands) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise EnvironmentLacks(f"ip {commands[0]}: {done.stderr.strip()}; try --no-namespaces")


def free_management_net() -> ipaddress.IPv4Network:
    """Return a /24 of `MANAGEMENT` that overlaps no route of this machine."""
    listed = subprocess.run(["ip", "-4", "-json", "route"], capture_output=True, text=True, check=True)
    taken = [ipaddress.ip_network(r["dst"], strict=False) for r in json.loads(listed.stdout or "[]") if r["dst"] != "default"]
    for net in MANAGEMENT.subnets(new_prefix=24):
        if not any(net.overlaps(other) for other in taken):
            return net  # type: ignore[return-value]
    raise EnvironmentLacks(f"every network in {MANAGEMENT} is in use on this machine; try --no-namespaces")


def cgroup_root() -> Path | None:
    """Return the folder whose subfolders are CPU cgroups: version 1 or 2; None where there is none."""
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, kind, options, *_ = line.split()
            if kind == "cgroup" and "cpu" in options.split(","):
                return Path(mount)
            if kind == "cgroup2" and "cpu" in (Path(mount) / "cgroup.controllers").read_text(encoding="utf-8").split():
                return Path(mount)
    return None


def cgroup_v1_root(controller: str) -> Path | None:
    """Return where a controller of cgroup version 1 is mounted, None where it is not."""
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, kind, options, *_ = line.split()
            if kind == "cgroup" and controller in options.split(","):
                return Path(mount)
    return None


def make_cgroup(name: str, controller: str = "cpu") -> Path | None:
    """Return a new cgroup in which CPU time, or what else `controller` governs, can be limited; None where rights or it lack."""
    root = cgroup_root() if controller == "cpu" else cgroup_v1_root(controller)
    if root is None:
        return None
    path = root / name
    try:
        path.mkdir()
        if controller == "cpu" and not any((path / limit).exists() for limit in ("cpu.max", "cpu.cfs_quota_us")):
            (root / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        with suppress(OSError):
            path.rmdir()
        return None
    return path


def _remove_cgroup(path: Path) -> None:
    deadline_s = monotonic_s() + STOP_S
    while path.exists():
        try:
            path.rmdir()
        except OSError:
            if monotonic_s() > deadline_s:
                return
            SystemClock().sleep_s(0.02)


def make_disk(mount: Path) -> Path:
    """Return `mount`, a new folder with a small file system of its own: ext4 in a file beside it.

    Raises
    ------
    EnvironmentLacks
        It cannot be made or mounted.
    """
    mount.mkdir(parents=True)
    image = mount.with_name(f"{mount.name}.img")
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    # Without a journal: what a rank writes is written in its own name, and so can be limited.
    for command in (["mkfs.ext4", "-qF", "-O", "^has_journal", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        run(*command)
    return mount


def run(*command: str) -> None:
    """Run a tool of the system. Raises EnvironmentLacks with its own words when it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise EnvironmentLacks(f"the command {command[0]} is missing") from None
    except subprocess.CalledProcessError as error:
        raise EnvironmentLacks(f"{' '.join(command)}: {error.stderr.strip()}") from None


def mounts_below(folder: Path) -> list[Path]:
    """Return where file systems are mounted below `folder`."""
    with suppress(OSError):
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        return [path for line in lines if (path := Path(line.split()[1])).is_relative_to(folder)]
    return []


def thaw_below(folder: Path) -> None:
    """Thaw each frozen disk below `folder`."""
    for mount in mounts_below(folder):
        subprocess.run(["fsfreeze", "--unfreeze", str(mount)], check=False, capture_output=True)


def unmount_below(folder: Path) -> None:
    """Unmount and delete the disks below `folder`, frozen or not."""
    thaw_below(folder)
    for mount in mounts_below(folder):
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
        mount.with_name(f"{mount.name}.img").unlink(missing_ok=True)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and their groups: SIGTERM, after `STOP_S` SIGKILL, and reap them; stopped ones too."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
        _signal_group(process, signal.SIGCONT)
    deadline_s = monotonic_s() + STOP_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - monotonic_s()))
    for process in processes:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def free_port() -> int:
    """Return a TCP port of loopback that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of loopback that were free a moment ago."""
    held = []
    try:
        for _ in range(count):
            held.append(socket.create_server(("127.0.0.1", 0)))
        return [int(server.getsockname()[1]) for server in held]
    finally:
        for server in held:
            server.close()


def loopback() -> str:
    """Return the name of the loopback device: ``lo``, on macOS ``lo0``."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


@contextmanager
def _setup_lock() -> Iterator[None]:
    STATE.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(STATE, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
