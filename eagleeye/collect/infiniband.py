"""Counters and state of InfiniBand and RoCE ports, from /sys/class/infiniband."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from eagleeye.collect.base import Site
from eagleeye.errors import NoData
from eagleeye.metrics import PREFIX
from eagleeye.records import Sample

_WORD_BYTES = 4
"""port_xmit_data and port_rcv_data count words of 32 bits. Source: InfiniBand Architecture Specification 1.4, PortCounters."""

_ERRORS = ("symbol_error", "link_error_recovery", "port_rcv_errors", "port_xmit_discards")


class InfinibandCollector:
    """One set of samples a port. A port that never carried anything and is not active is a free socket, and is left out."""

    name = "infiniband"

    def __init__(self, site: Site) -> None:
        self._root = site.sys / "class" / "infiniband"

    def supported(self) -> bool:
        """Whether the kernel knows any such device."""
        return self._root.is_dir()

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return the counters of every port; what cannot be read of a port is left out, and only that.

        Raises
        ------
        NoData
            There is no device.
        OSError
            There are ports, and none could be read.
        """
        ports = sorted(self._root.glob("*/ports/*"))
        if not ports:
            raise NoData(f"no device below {self._root}")
        readable = False
        for port in ports:
            values = _read(port)
            readable = readable or bool(values)
            used = values.get("up") or values.get("data_transmitted_bytes_total") or values.get("data_received_bytes_total")
            for name, value in values.items() if used else ():
                yield Sample(f"{PREFIX}infiniband_port_{name}", {"device": port.parent.parent.name, "port": port.name}, value)
        if not readable:
            raise OSError(f"none of the {len(ports)} ports below {self._root} can be read")


def _read(port: Path) -> dict[str, float]:
    """Return what the folder of one port tells, by the end of the series' name."""
    values: dict[str, float] = {}
    sent, received, wait = (_counter(port, name) for name in ("port_xmit_data", "port_rcv_data", "port_xmit_wait"))
    if sent is not None:
        values["data_transmitted_bytes_total"] = float(sent * _WORD_BYTES)
    if received is not None:
        values["data_received_bytes_total"] = float(received * _WORD_BYTES)
    if wait is not None:
        values["transmit_wait_total"] = float(wait)
    errors = [count for count in (_counter(port, name) for name in _ERRORS) if count is not None]
    if errors:
        values["errors_total"] = float(sum(errors))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        values["up"] = float("ACTIVE" in (port / "state").read_text(encoding="ascii").split(":")[-1].split())
    return values


def _counter(port: Path, name: str) -> int | None:
    for folder in ("counters", "hw_counters"):
        try:
            with open(os.path.join(port, folder, name), "rb") as file:
                return int(file.read(64))
        except (OSError, ValueError):
            # Some drivers answer EINVAL or "N/A (no PMA)" for a counter that their device lacks.
            continue
    return None
