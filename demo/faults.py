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
    return draw.choice(cluster.nodes), draw.choice(NET_MODES)


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
    return {"kill": _kill, "hang": _hang, "slow": _slow}[fault](node, clock)


def _kill(node: Node, clock: Clock) -> Fault:
    at_s = clock.now_s()
    os.kill(_pid(node), signal.SIGKILL)
    return Fault("kill", node.name, node.rank, f"The process of rank {node.rank} got SIGKILL.", at_s)


def _hang(node: Node, clock: Clock) -> Fault:
    at_s = clock.now_s()
    os.kill(_pid(node), signal.SIGSTOP)
    return Fault("hang", node.name, node.rank, f"The process of rank {node.rank} got SIGSTOP.", at_s)


def _slow(node: Node, clock: Clock) -> Fault:
    before_s = _cpu_s(node)
    clock.sleep_s(MEASURE_S)
    allowed = max(0.02, SHARE_LEFT * (_cpu_s(node) - before_s) / MEASURE_S)
    at_s = clock.now_s()
    if node.cgroup and limit_cpu(node.cgroup, allowed):
        how = f"A CPU quota leaves rank {node.rank} {allowed:.0%} of a core, {SHARE_LEFT:.0%} of what it used."
    else:
        threading.Thread(target=_duty_cycle, args=(node, min(allowed, 0.9), clock), daemon=True).start()
        how = f"SIGSTOP and SIGCONT in turn let rank {node.rank} run {min(allowed, 0.9):.0%} of the time."
    return Fault("slow", node.name, node.rank, how, at_s)


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
        return Fault("net", node.name, node.rank, f"The switch port of {node.name} was taken down.", at_s)
    if mode == "loss":
        at_s = clock.now_s()
        drop_packets(cluster.switch, node.switch_port, LOSS_PERCENT)
        how = f"The switch drops {LOSS_PERCENT} % of the packets that {node.name} sends."
        return Fault("net", node.name, node.rank, how, at_s)
    before_bytes = _sent_bytes(node)
    clock.sleep_s(MEASURE_S)
    rate_bytes = max(20_000, round(SHARE_LEFT * (_sent_bytes(node) - before_bytes) / MEASURE_S))
    at_s = clock.now_s()
    limit_rate(node, rate_bytes)
    how = f"The fabric port of {node.name} sends at most {rate_bytes / 1e6:.2f} MB/s, {SHARE_LEFT:.0%} of what it sent."
    return Fault("net", node.name, node.rank, how, at_s)


def limit_cpu(cgroup: Path, cores: float) -> bool:
    """Let the processes in `cgroup` use `cores` CPUs; False where the kernel refuses."""
    quota_us = max(1000, round(cores * PERIOD_US))
    with suppress(OSError):
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


def _pid(node: Node) -> int:
    if node.rank_process is None or node.rank_process.poll() is not None:
        raise EnvironmentLacks(f"rank {node.rank} no longer runs, so it cannot be broken; see {node.log}")
    return node.rank_process.pid


def _cpu_s(node: Node) -> float:
    """CPU seconds of the rank's process so far."""
    fields = Path(f"/proc/{_pid(node)}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK_HZ


def _sent_bytes(node: Node) -> int:
    """Bytes that left the node's fabric port so far; the kernel shows each process the devices of its own namespace."""
    for line in Path(f"/proc/{_pid(node)}/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise EnvironmentLacks(f"{node.name} has no fabric port eth0")


def _duty_cycle(node: Node, share: float, clock: Clock) -> None:
    period_s = PERIOD_US / 1e6
    process = node.rank_process
    while process is not None and process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
            clock.sleep_s(period_s * (1 - share))
            os.kill(process.pid, signal.SIGCONT)
            clock.sleep_s(period_s * share)
