"""Breaks one node of a running cluster for real, from outside: the training script and the detection know nothing of it."""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from cluster import Cluster, Node

from eagleeye.clock import Clock, SystemClock
from eagleeye.errors import EnvironmentLacks, UsageError

FAULTS = ("kill", "hang", "slow", "net")
NET_MODES = ("limit", "loss", "cut")
SHARE_LEFT = 0.3
"""Of what the healthy rank used (CPU time, fabric bytes) `slow` and `limit` leave this much: about three times slower."""
LOSS_PERCENT = 20
MEASURE_S = 3.0
PERIOD_US = 100_000
TICK_HZ = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What was broken, for the report. `at_s` is seconds since the epoch, `how` one sentence."""

    fault: str
    node: str
    rank: int
    how: str
    at_s: float


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
    clock = clock or SystemClock()
    if fault not in FAULTS:
        raise UsageError(f"no fault is called {fault!r}; there are {', '.join(FAULTS)}")
    if fault == "net":
        return _net(cluster, node, mode or drawn_mode, clock)
    return {"kill": _kill, "hang": _hang, "slow": _slow}[fault](cluster, node, clock)


def _kill(cluster: Cluster, node: Node, clock: Clock) -> Fault:
    at_s = clock.now_s()
    os.kill(_pid(cluster, node), signal.SIGKILL)
    return Fault("kill", node.name, node.number, f"The process of rank {node.number} got SIGKILL.", at_s)


def _hang(cluster: Cluster, node: Node, clock: Clock) -> Fault:
    at_s = clock.now_s()
    os.kill(_pid(cluster, node), signal.SIGSTOP)
    return Fault("hang", node.name, node.number, f"The process of rank {node.number} got SIGSTOP.", at_s)


def _slow(cluster: Cluster, node: Node, clock: Clock) -> Fault:
    before_s = _cpu_s(cluster, node)
    clock.sleep_s(MEASURE_S)
    allowed = max(0.02, SHARE_LEFT * (_cpu_s(cluster, node) - before_s) / MEASURE_S)
    at_s = clock.now_s()
    # Only the rank: clusters reserve CPU for their daemons, and a starved exporter would hide the fault it reports.
    if node.cgroup and limit_cpu(node.cgroup, _pid(cluster, node), allowed):
        how = f"A CPU quota leaves rank {node.number} {allowed:.0%} of a core, {SHARE_LEFT:.0%} of what it used."
    else:
        threading.Thread(target=_duty_cycle, args=(_pid(cluster, node), min(allowed, 0.9), clock), daemon=True).start()
        how = f"SIGSTOP and SIGCONT in turn let rank {node.number} run {min(allowed, 0.9):.0%} of the time."
    return Fault("slow", node.name, node.number, how, at_s)


def _net(cluster: Cluster, node: Node, mode: str, clock: Clock) -> Fault:
    if mode not in NET_MODES:
        raise UsageError(f"no network mode is called {mode!r}; there are {', '.join(NET_MODES)}")
    if not (node.namespace and node.switch_port and cluster.switch):
        raise EnvironmentLacks("network faults need network namespaces, and this cluster runs on loopback: run it as root")
    if mode == "loss" and not shutil.which("nft"):
        mode = "limit"
    if mode == "cut":
        at_s = clock.now_s()
        run("ip", "-n", cluster.switch, "link", "set", node.switch_port, "down")
        return Fault("net", node.name, node.number, f"The switch port of {node.name} was taken down.", at_s)
    if mode == "loss":
        at_s = clock.now_s()
        drop_packets(cluster.switch, node.switch_port, LOSS_PERCENT)
        how = f"The switch drops {LOSS_PERCENT} % of the packets that {node.name} sends."
        return Fault("net", node.name, node.number, how, at_s)
    before_bytes = _sent_bytes(cluster, node)
    clock.sleep_s(MEASURE_S)
    rate_bytes = max(20_000, round(SHARE_LEFT * (_sent_bytes(cluster, node) - before_bytes) / MEASURE_S))
    at_s = clock.now_s()
    limit_rate(node, rate_bytes)
    how = f"The fabric port of {node.name} sends at most {rate_bytes / 1e6:.2f} MB/s, {SHARE_LEFT:.0%} of what it sent."
    return Fault("net", node.name, node.number, how, at_s)


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


def run(*command: str) -> None:
    """Run a tool of the system. Raises EnvironmentLacks with its own words when it fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise EnvironmentLacks(f"the command {command[0]} is missing") from None
    except subprocess.CalledProcessError as error:
        raise EnvironmentLacks(f"{' '.join(command)}: {error.stderr.strip()}") from None


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
