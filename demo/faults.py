"""Breaks one node of a running cluster for real, from outside: the training script and the detection know nothing of it.

`inject` is what the demo uses. `stall_disk`, `squeeze_memory` and `crowd` need isolated nodes, see `Cluster`.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster import Cluster, Node, run

from eagleeye.clock import Clock, SystemClock
from eagleeye.errors import EnvironmentLacks, UsageError

FAULTS = ("kill", "hang", "slow", "net")
NET_MODES = ("limit", "loss", "cut")
SHARE_LEFT = 0.3
"""Of what the healthy rank used (CPU time, fabric bytes) `slow` and `limit` leave this much: about three times slower."""
LOSS_PERCENT = 20
MEASURE_S = 3.0
PERIOD_US = 100_000
SHRINK_TRIES = 20
TICK_HZ = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What was broken, for the report. `at_s` is seconds since the epoch, `how` one sentence.

    `undo` takes the fault away; None where that is not possible.
    """

    fault: str
    node: str
    rank: int
    how: str
    at_s: float
    undo: Callable[[], None] | None = None


def choose(cluster: Cluster, seed: int) -> tuple[Node, str]:
    """Return the node that `seed` breaks and the mode in which it would break the network."""
    draw = random.Random(seed)
    return draw.choice([node for node in cluster.nodes if not node.spare]), draw.choice(NET_MODES)


def inject(cluster: Cluster, fault: str, seed: int, *, mode: str | None = None, clock: Clock | None = None) -> Fault:
    """Break the node that `seed` chooses; `mode` overrides the chosen network mode. The fault lasts until the cluster stops.

    ``slow`` and ``net`` with mode ``limit`` first watch the healthy node for `MEASURE_S`.

    Raises
    ------
    UsageError
        Unknown fault or mode.
    EnvironmentLacks
        A network fault without namespaces, or a tool is missing.
    """
    node, drawn_mode = choose(cluster, seed)
    return break_node(cluster, node, fault, mode=mode or drawn_mode, clock=clock)


def break_node(cluster: Cluster, node: Node, fault: str, *, mode: str = "", clock: Clock | None = None) -> Fault:
    """Break this node as `inject` does, and raise as it does; `mode` is that of a network fault."""
    clock = clock or SystemClock()
    if fault not in FAULTS:
        raise UsageError(f"no fault is called {fault!r}; there are {', '.join(FAULTS)}")
    if fault == "net":
        return _net(cluster, node, mode, clock)
    return {"kill": _kill, "hang": _hang, "slow": _slow}[fault](cluster, node, clock)


def _kill(cluster: Cluster, node: Node, clock: Clock) -> Fault:
    at_s = clock.now_s()
    os.kill(_pid(cluster, node), signal.SIGKILL)
    return Fault("kill", node.name, node.number, f"The process of rank {node.number} got SIGKILL.", at_s)


def _hang(cluster: Cluster, node: Node, clock: Clock) -> Fault:
    at_s, pid = clock.now_s(), _pid(cluster, node)
    os.kill(pid, signal.SIGSTOP)
    how = f"The process of rank {node.number} got SIGSTOP."
    return Fault("hang", node.name, node.number, how, at_s, lambda: os.kill(pid, signal.SIGCONT))


def _slow(cluster: Cluster, node: Node, clock: Clock) -> Fault:
    before_s = _cpu_s(cluster, node)
    clock.sleep_s(MEASURE_S)
    allowed = max(0.02, SHARE_LEFT * (_cpu_s(cluster, node) - before_s) / MEASURE_S)
    at_s = clock.now_s()
    # Only the rank: clusters reserve CPU for their daemons, and a starved exporter would hide the fault it reports.
    undo = None
    if node.cgroup and limit_cpu(node.cgroup, _pid(cluster, node), allowed):
        cgroup = node.cgroup
        undo = lambda: unlimit_cpu(cgroup)  # noqa: E731
        how = f"A CPU quota leaves rank {node.number} {allowed:.0%} of a core, {SHARE_LEFT:.0%} of what it used."
    else:
        threading.Thread(target=_duty_cycle, args=(_pid(cluster, node), min(allowed, 0.9), clock), daemon=True).start()
        how = f"SIGSTOP and SIGCONT in turn let rank {node.number} run {min(allowed, 0.9):.0%} of the time."
    return Fault("slow", node.name, node.number, how, at_s, undo)


def _net(cluster: Cluster, node: Node, mode: str, clock: Clock) -> Fault:
    if mode not in NET_MODES:
        raise UsageError(f"no network mode is called {mode!r}; there are {', '.join(NET_MODES)}")
    if not (node.namespace and node.switch_port and cluster.switch):
        raise EnvironmentLacks("network faults need network namespaces, and this cluster runs on loopback: run it as root")
    if mode == "loss" and not shutil.which("nft"):
        mode = "limit"
    if mode == "cut":
        at_s = clock.now_s()
        port = ("ip", "-n", cluster.switch, "link", "set", node.switch_port)
        run(*port, "down")
        how = f"The switch port of {node.name} was taken down."
        return Fault("net", node.name, node.number, how, at_s, lambda: run(*port, "up"))
    if mode == "loss":
        at_s = clock.now_s()
        drop_packets(cluster.switch, node.switch_port, LOSS_PERCENT)
        how = f"The switch drops {LOSS_PERCENT} % of the packets that {node.name} sends."
        nft = ("ip", "netns", "exec", cluster.switch, "nft", "delete table netdev loss")
        return Fault("net", node.name, node.number, how, at_s, lambda: run(*nft))
    before_bytes = _sent_bytes(cluster, node)
    clock.sleep_s(MEASURE_S)
    rate_bytes = max(20_000, round(SHARE_LEFT * (_sent_bytes(cluster, node) - before_bytes) / MEASURE_S))
    at_s = clock.now_s()
    limit_rate(node, rate_bytes)
    how = f"The fabric port of {node.name} sends at most {rate_bytes / 1e6:.2f} MB/s, {SHARE_LEFT:.0%} of what it sent."
    qdisc = node.command("tc", "qdisc", "del", "dev", "eth0", "root")
    return Fault("net", node.name, node.number, how, at_s, lambda: run(*qdisc))


def stall_disk(cluster: Cluster, node: Node, bytes_per_second: int = 0, clock: Clock | None = None) -> Fault:
    """Freeze the node's disk, so that every write waits, or let the rank write no faster than `bytes_per_second`.

    Raises
    ------
    EnvironmentLacks
        The node has no disk of its own, or the kernel refuses.
    """
    if not (node.disk and node.blkio_cgroup):
        raise EnvironmentLacks(f"{node.name} has no disk of its own, and that of the machine is not broken")
    at_s, disk = (clock or SystemClock()).now_s(), node.disk
    if not bytes_per_second:
        run("fsfreeze", "--freeze", str(disk))
        how = f"The disk of {node.name} was frozen."
        return Fault("disk", node.name, node.number, how, at_s, lambda: run("fsfreeze", "--unfreeze", str(disk)))
    limit, device = node.blkio_cgroup / "blkio.throttle.write_bps_device", disk.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    _set(limit, f"{number} {bytes_per_second}")
    how = f"The disk of {node.name} takes at most {bytes_per_second / 1e3:.0f} kB/s."
    return Fault("disk", node.name, node.number, how, at_s, lambda: _set(limit, f"{number} 0"))


def squeeze_memory(cluster: Cluster, node: Node, share: float, clock: Clock | None = None) -> Fault:
    """Leave the rank `share` of the memory that it uses; the kernel swaps the rest out and in again, or lets the rank wait.

    Raises
    ------
    EnvironmentLacks
        The node has no memory cgroup, or the machine no swap space.
    """
    if not node.memory_cgroup:
        raise EnvironmentLacks(f"{node.name} has no memory cgroup of its own")
    if len(Path("/proc/swaps").read_text(encoding="utf-8").splitlines()) < 2:
        raise EnvironmentLacks("the machine has no swap space, so a rank without memory would be killed; see swapon(8)")
    limit, control = node.memory_cgroup / "memory.limit_in_bytes", node.memory_cgroup / "memory.oom_control"
    _set(control, "1")  # wait for memory rather than kill: swapping out may be slower than what a rank asks for
    used_bytes = int((node.memory_cgroup / "memory.usage_in_bytes").read_text())
    at_s = (clock or SystemClock()).now_s()
    for percent in range(98, -2, -2):
        _shrink(limit, round(used_bytes * (share + (1 - share) * percent / 100)), clock or SystemClock())
    how = f"Rank {node.number} may use {share * used_bytes / 1e6:.0f} MB of memory, {share:.0%} of what it used."

    def undo() -> None:
        _set(limit, "-1")
        _set(control, "0")

    return Fault("memory", node.name, node.number, how, at_s, undo)


def press_memory(node: Node, factor: float) -> bool:
    """Multiply the limit that `squeeze_memory` set; False where the kernel finds no more memory to take away just now."""
    assert node.memory_cgroup
    limit = node.memory_cgroup / "memory.limit_in_bytes"
    with suppress(OSError):
        limit.write_text(str(round(int(limit.read_text()) * factor)))
        return True
    return False


def exhaust_memory(cluster: Cluster, node: Node, clock: Clock | None = None) -> Fault:
    """Let another process take all memory of the node, which has little more than is used: the kernel kills the rank.

    Raises
    ------
    EnvironmentLacks
        The node has no memory cgroup.
    """
    if not node.memory_cgroup:
        raise EnvironmentLacks(f"{node.name} has no memory cgroup of its own")
    cgroup = node.memory_cgroup
    size_bytes = int((cgroup / "memory.usage_in_bytes").read_text()) + (32 << 20)
    at_s = (clock or SystemClock()).now_s()
    _set(cgroup / "memory.limit_in_bytes", str(size_bytes))
    _set(cgroup / "memory.memsw.limit_in_bytes", str(size_bytes))
    hog = _hog(cgroup, "held = [b'x' * (1 << 20) for _ in range(128)]; import time; time.sleep(1000)", spared=True)
    how = f"Another process took the memory of {node.name}, {size_bytes / 1e6:.0f} MB, until the kernel killed a process there."

    def undo() -> None:
        _end(hog)
        _set(cgroup / "memory.memsw.limit_in_bytes", "-1")
        _set(cgroup / "memory.limit_in_bytes", "-1")

    return Fault("memory", node.name, node.number, how, at_s, undo)


def crowd(cluster: Cluster, node: Node, cores: float, hogs: int = 2, clock: Clock | None = None) -> Fault:
    """Let `hogs` busy processes share `cores` CPUs with the rank: a noisy neighbour.

    Raises
    ------
    EnvironmentLacks
        The node has no CPU cgroup.
    """
    at_s = (clock or SystemClock()).now_s()
    if not (node.cgroup and limit_cpu(node.cgroup, _pid(cluster, node), cores)):
        raise EnvironmentLacks(f"{node.name} has no CPU cgroup of its own")
    cgroup = node.cgroup
    busy = [_hog(cgroup, "while True: pass") for _ in range(hogs)]
    how = f"{hogs} busy processes shared {cores:g} cores with rank {node.number}."

    def undo() -> None:
        for hog in busy:
            _end(hog)
        unlimit_cpu(cgroup)

    return Fault("neighbour", node.name, node.number, how, at_s, undo)


def _hog(cgroup: Path, program: str, *, spared: bool = False) -> subprocess.Popen[bytes]:
    """Start a small Python program inside `cgroup`; a spared one is never killed for its memory."""
    enter = f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write('0')\n"
    if spared:
        enter += "open('/proc/self/oom_score_adj', 'w').write('-1000')\n"
    wrapper = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return subprocess.Popen([*wrapper, sys.executable, "-S", "-c", enter + program], stdin=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _set(file: Path, value: str) -> None:
    try:
        file.write_text(value)
    except OSError as error:
        raise EnvironmentLacks(f"cannot write {value!r} to {file}: {error.strerror}") from None


def _shrink(limit: Path, size_bytes: int, clock: Clock) -> None:
    """Lower a memory limit by a little. The kernel gives up quickly where pages are in use, so it is asked again."""
    for _ in range(SHRINK_TRIES):
        with suppress(OSError):
            limit.write_text(str(size_bytes))
            return
        clock.sleep_s(0.05)
    _set(limit, str(size_bytes))


def unlimit_cpu(cgroup: Path) -> None:
    """Take the limit of `limit_cpu` away."""
    with suppress(OSError):
        if (cgroup / "cpu.max").exists():
            (cgroup / "cpu.max").write_text(f"max {PERIOD_US}")
        else:
            (cgroup / "cpu.cfs_quota_us").write_text("-1")


def limit_cpu(cgroup: Path, pid: int, cores: float) -> bool:
    """Move a process into `cgroup` and let it use `cores` CPUs; False where the kernel refuses."""
    quota_us = max(1000, round(cores * PERIOD_US))
    with suppress(OSError):
        (cgroup / "cgroup.procs").write_text(str(pid))
        if (cgroup / "cpu.max").exists():
            (cgroup / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (cgroup / "cpu.cfs_quota_us").write_text(str(quota_us))
        return True
    return False


def limit_rate(node: Node, bytes_per_second: int) -> None:
    """Let the node's fabric port send no faster; what it may not send waits in the node."""
    rate = f"{bytes_per_second}bps"
    run(*node.command("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"))


def drop_packets(switch: str, port: str, percent: int) -> None:
    """Drop a share of what enters the switch at `port`: on the wire, so that the sender learns of it only by missing answers."""
    rules = (
        f'table netdev loss {{ chain entry {{ type filter hook ingress device "{port}" priority 0; '
        f"numgen random mod 100 < {percent} counter drop; }}; }}"
    )
    run("ip", "netns", "exec", switch, "nft", rules)


def _pid(cluster: Cluster, node: Node) -> int:
    pid = cluster.pid(node)
    if pid is None:
        raise EnvironmentLacks(f"rank {node.number} does not run, so it cannot be broken; see {node.log}")
    return pid


def _cpu_s(cluster: Cluster, node: Node) -> float:
    """CPU seconds of the rank's process so far."""
    fields = Path(f"/proc/{_pid(cluster, node)}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK_HZ


def _sent_bytes(cluster: Cluster, node: Node) -> int:
    """Bytes that left the node's fabric port so far; the kernel shows each process the devices of its own namespace."""
    for line in Path(f"/proc/{_pid(cluster, node)}/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise EnvironmentLacks(f"{node.name} has no fabric port eth0")


def _duty_cycle(pid: int, share: float, clock: Clock) -> None:
    period_s = PERIOD_US / 1e6
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            clock.sleep_s(period_s * (1 - share))
            os.kill(pid, signal.SIGCONT)
            clock.sleep_s(period_s * share)
