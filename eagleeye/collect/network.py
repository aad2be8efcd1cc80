"""The node's own network devices and TCP, as the exporter's network namespace shows them. Loopback belongs to nobody."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from eagleeye.clock import monotonic_s
from eagleeye.collect.base import MeanSinceTaken, Site
from eagleeye.errors import NoData
from eagleeye.metrics import PREFIX
from eagleeye.records import Sample

_SIOCGIFFLAGS = 0x8913
_IFF_UP_RUNNING = 0x41
_ESTABLISHED = "01"


class NetworkCollector:
    """Counters of each device that ever carried anything, retransmissions, and the mean length of the TCP send queues.

    Where the node has physical devices only they count: bridges, bonds and tunnels carry the same bytes once more.
    """

    name = "network"

    def __init__(self, site: Site) -> None:
        self._proc = site.proc
        self._sys = site.sys
        self._queue = site.shared(SendQueue)

    def supported(self) -> bool:
        """Whether the kernel has a network."""
        return (self._proc / "net" / "dev").exists()

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return the samples of every device and of TCP. Raises NoData where loopback is all there is."""
        devices = self._devices()
        for device, values in devices.items():
            for name, value in values.items():
                yield Sample(PREFIX + name, {"device": device}, value)
        if not devices:
            raise NoData("this network namespace has no device but loopback that ever carried anything")
        retransmits = _retransmits(self._proc / "net" / "snmp")
        if retransmits is not None:
            yield Sample(PREFIX + "network_tcp_retransmits_total", {}, retransmits)
        queue_bytes = self._queue.mean_bytes.take()
        if queue_bytes is not None:
            yield Sample(PREFIX + "network_tcp_send_queue_bytes", {}, queue_bytes)

    def _devices(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for line in (self._proc / "net" / "dev").read_text(encoding="ascii").splitlines()[2:]:
            device, _, rest = line.strip().partition(":")
            fields = [float(field) for field in rest.split()]
            if device == "lo" or len(fields) < 16 or not (fields[0] or fields[8]):
                continue
            found[device] = {
                "network_receive_bytes_total": fields[0],
                "network_transmit_bytes_total": fields[8],
                "network_errors_total": fields[2] + fields[3] + fields[10] + fields[11],
            }
        physical = [device for device in found if (self._sys / "class" / "net" / device / "device").exists()]
        for device in set(found) - set(physical) if physical else ():
            del found[device]
        for device, values in found.items():
            up = self._carrier(device)
            if up is not None:
                values["network_up"] = float(up)
        return found

    def _carrier(self, device: str) -> bool | None:
        # What is mounted at /sys may belong to another network namespace (after setns, say): there the kernel is asked directly.
        if self._sys == Path("/sys"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                request = struct.pack("16sH14x", device.encode()[:15], 0)
                try:
                    answer = fcntl.ioctl(asking.fileno(), _SIOCGIFFLAGS, request)
                except OSError:
                    return None
            flags: int = struct.unpack_from("H", answer, 16)[0]
            return flags & _IFF_UP_RUNNING == _IFF_UP_RUNNING
        try:
            return (self._sys / "class" / "net" / device / "carrier").read_text(encoding="ascii").strip() == "1"
        except FileNotFoundError:
            return None
        except OSError:
            # The file of a device that is switched off cannot be read.
            return False


def _retransmits(path: Path) -> float | None:
    """Return RetransSegs of /proc/net/snmp, or None when it is not there."""
    try:
        tcp = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line.startswith("Tcp:")]
        return float(dict(zip(*tcp, strict=True))["RetransSegs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def send_queue_bytes(table: str) -> int:
    """Return the bytes in the send queues of the established connections of a /proc/net/tcp or tcp6, loopback left out.

    Raises
    ------
    ValueError
        A line is none of the kernel's.
    """
    total = 0
    for line in table.splitlines()[1:]:
        fields = line.split(maxsplit=5)
        if len(fields) < 5 or fields[3] != _ESTABLISHED or fields[4].startswith("00000000:"):
            continue
        local, remote = fields[1].partition(":")[0], fields[2].partition(":")[0]
        # A connection to an own address goes through loopback too.
        if local != remote and not _address(remote).is_loopback:
            total += int(fields[4].partition(":")[0], 16)
    return total


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that the kernel printed as 32-bit words in the machine's byte order."""
    words = (int(text[i : i + 8], 16) for i in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


class SendQueue:
    """Mean length of the send queues since the last look, from a few samples a second."""

    PERIOD_S = 0.25

    def __init__(self, site: Site) -> None:
        self._paths = (site.proc / "net" / "tcp", site.proc / "net" / "tcp6")
        self.mean_bytes = MeanSinceTaken()
        self.sample()
        site.background(self._work)

    def sample(self) -> None:
        """Look at the queues once."""
        tables = []
        for path in self._paths:
            try:
                tables.append(path.read_text(encoding="ascii"))
            except OSError:
                continue
        if tables:
            self.mean_bytes.look(sum(send_queue_bytes(table) for table in tables))

    def _work(self) -> float:
        began_s = monotonic_s()
        self.sample()
        # A node with tens of thousands of connections is looked at less often, for at most five percent of a CPU.
        return max(self.PERIOD_S, 20 * (monotonic_s() - began_s))
