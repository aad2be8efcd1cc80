"""The catalogue: every series that the exporters serve and every column that a window may carry.

A row joins the two names. `series` is what Prometheus stores; `column` is what detectors read. `kind` says how one becomes the
other: a gauge as it is, a counter as its rate per second, a timestamp as its age in seconds. A row without `series` is a column
that only recorded traces bring. Units are Prometheus base units.
"""

from dataclasses import dataclass
from typing import Literal

from eagleeye.errors import DataError

Kind = Literal["gauge", "counter", "timestamp", "info"]
Scope = Literal["gpu", "port", "device", "node", "rank"]

PREFIX = "eagleeye_"
LABELS: dict[Scope, tuple[str, ...]] = {
    "gpu": ("node", "gpu", "uuid"),
    "port": ("node", "device", "port"),
    "device": ("node", "device"),
    "node": ("node",),
    "rank": ("node", "training_job", "rank"),
}
UNITS = ("1", "bytes", "bytes/s", "watts", "celsius", "hertz", "seconds", "1/s", "steps")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the catalogue.

    `join` says how several series of one rank (the ports of its node, say) become one value. `compared` columns are compared
    between ranks by the detectors; the others are facts for the rules (an age, a counter, a state). `noise` is a difference between
    ranks that is ordinary however quiet the metric was while it was learned; None leaves that to the unit. `worse` is the side of the
    peers on which a sick rank lies, None for both.
    """

    column: str
    unit: str
    scope: Scope
    kind: Kind
    series: str | None
    help: str
    join: Literal["sum", "max", "min"] = "sum"
    extra_labels: tuple[str, ...] = ()
    compared: bool = True
    noise: float | None = None
    worse: Literal["high", "low"] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names of the series, in order."""
        return LABELS[self.scope] + self.extra_labels


RANK_INFO = Metric(
    "rank_info",
    "1",
    "rank",
    "info",
    PREFIX + "rank_info",
    "Which rank of which job runs as which process on which GPU; always 1.",
    extra_labels=("local_rank", "world_size", "gpu", "group", "pid"),
)

CATALOGUE: tuple[Metric, ...] = (
    # GPU, by NVML
    Metric(
        "gpu_utilization_ratio", "1", "gpu", "gauge", PREFIX + "gpu_utilization_ratio", "Share of time in which a kernel ran."
    ),
    Metric("gpu_tensor_active_ratio", "1", "gpu", "gauge", None, "Share of cycles in which tensor cores were active."),
    Metric(
        "gpu_memory_used_bytes",
        "bytes",
        "gpu",
        "gauge",
        PREFIX + "gpu_memory_used_bytes",
        "Device memory in use.",
        compared=False,
    ),
    Metric("gpu_power_watts", "watts", "gpu", "gauge", PREFIX + "gpu_power_watts", "Power drawn by the board."),
    Metric(
        "gpu_temperature_celsius",
        "celsius",
        "gpu",
        "gauge",
        PREFIX + "gpu_temperature_celsius",
        "Core temperature.",
        "max",
        noise=3.0,
        worse="high",
    ),
    Metric(
        "gpu_sm_clock_hertz",
        "hertz",
        "gpu",
        "gauge",
        PREFIX + "gpu_sm_clock_hertz",
        "Clock of the streaming multiprocessors.",
        "min",
        worse="low",
    ),
    # InfiniBand and RoCE ports, from /sys/class/infiniband
    Metric(
        "ib_transmit_bytes_per_second",
        "bytes/s",
        "port",
        "counter",
        PREFIX + "infiniband_port_data_transmitted_bytes_total",
        "Data sent by the port (port_xmit_data x 4).",
        worse="low",
    ),
    Metric(
        "ib_receive_bytes_per_second",
        "bytes/s",
        "port",
        "counter",
        PREFIX + "infiniband_port_data_received_bytes_total",
        "Data received by the port (port_rcv_data x 4).",
        worse="low",
    ),
    Metric(
        "ib_transmit_wait_ticks_per_second",
        "1/s",
        "port",
        "counter",
        PREFIX + "infiniband_port_transmit_wait_total",
        "Ticks in which the port had data to send and no credit.",
        worse="high",
    ),
    Metric(
        "ib_transmit_wait_ratio",
        "1",
        "port",
        "gauge",
        None,
        "Share of time with data to send and no credit.",
        "max",
        worse="high",
    ),
    Metric(
        "ib_port_errors_per_second",
        "1/s",
        "port",
        "counter",
        PREFIX + "infiniband_port_errors_total",
        "Symbol, link-recovery, receive and discard errors of the port.",
        worse="high",
    ),
    Metric(
        "ib_port_up",
        "1",
        "port",
        "gauge",
        PREFIX + "infiniband_port_up",
        "1 when the port's state is ACTIVE, else 0.",
        "min",
        compared=False,
    ),
    # The node's own network, from the network namespace of the exporter; never loopback
    Metric(
        "network_transmit_bytes_per_second",
        "bytes/s",
        "device",
        "counter",
        PREFIX + "network_transmit_bytes_total",
        "Bytes sent by the device.",
        worse="low",
    ),
    Metric(
        "network_receive_bytes_per_second",
        "bytes/s",
        "device",
        "counter",
        PREFIX + "network_receive_bytes_total",
        "Bytes received by the device.",
        worse="low",
    ),
    Metric(
        "network_errors_per_second",
        "1/s",
        "device",
        "counter",
        PREFIX + "network_errors_total",
        "Errors and drops of the device, both directions.",
        noise=1.0,
        worse="high",
    ),
    Metric(
        "network_up",
        "1",
        "device",
        "gauge",
        PREFIX + "network_up",
        "1 when the device has a carrier, else 0.",
        "min",
        compared=False,
    ),
    Metric(
        "network_retransmits_per_second",
        "1/s",
        "node",
        "counter",
        PREFIX + "network_tcp_retransmits_total",
        "TCP segments sent again.",
        noise=4.0,
        worse="high",
    ),
    Metric(
        "network_send_queue_bytes",
        "bytes",
        "node",
        "gauge",
        PREFIX + "network_tcp_send_queue_bytes",
        "Bytes that wait in the send queues of established TCP connections, mean over the time since the last scrape.",
        noise=8192.0,
        worse="high",
    ),
    # The rank's process, from /proc
    Metric(
        "process_up",
        "1",
        "rank",
        "gauge",
        PREFIX + "process_up",
        "1 while the rank's process exists, 0 after it vanished.",
        "min",
        compared=False,
    ),
    Metric(
        "process_exit_age_seconds",
        "seconds",
        "rank",
        "timestamp",
        PREFIX + "process_exit_timestamp_seconds",
        "When the rank's process vanished.",
        "max",
        compared=False,
    ),
    Metric(
        "process_stopped_ratio",
        "1",
        "rank",
        "gauge",
        PREFIX + "process_stopped_ratio",
        "Share of looks since the last scrape that found the process stopped or in uninterruptible sleep.",
        "max",
        compared=False,
    ),
    Metric(
        "process_cpu_ratio",
        "1",
        "rank",
        "counter",
        PREFIX + "process_cpu_seconds_total",
        "CPU time of the process and its threads.",
    ),
    Metric(
        "process_run_wait_ratio",
        "1",
        "rank",
        "counter",
        PREFIX + "process_run_wait_seconds_total",
        "Time in which threads of the process were ready to run but did not get a CPU.",
        worse="high",
    ),
    Metric(
        "process_memory_bytes",
        "bytes",
        "rank",
        "gauge",
        PREFIX + "process_resident_memory_bytes",
        "Resident memory of the process.",
        compared=False,
    ),
    # Progress, from the one-line hook or from the log
    Metric(
        "train_step_count",
        "steps",
        "rank",
        "gauge",
        PREFIX + "train_steps",
        "Training steps finished, as the job counts them.",
        "max",
        compared=False,
    ),
    Metric(
        "train_step_age_seconds",
        "seconds",
        "rank",
        "timestamp",
        PREFIX + "train_step_timestamp_seconds",
        "When the newest step finished.",
        "max",
        compared=False,
    ),
    Metric(
        "train_step_seconds",
        "seconds",
        "rank",
        "gauge",
        PREFIX + "train_step_seconds",
        "Duration of the newest step.",
        "max",
        compared=False,
    ),
    Metric(
        "train_compute_seconds",
        "seconds",
        "rank",
        "gauge",
        PREFIX + "train_compute_seconds",
        "Time of the newest step spent outside collectives.",
        "max",
        worse="high",
    ),
    Metric(
        "train_collective_ratio",
        "1",
        "rank",
        "gauge",
        PREFIX + "train_collective_ratio",
        "1 while the rank is inside a collective, else 0.",
        "max",
        compared=False,
    ),
    Metric(
        "train_phase",
        "1",
        "rank",
        "gauge",
        PREFIX + "train_phase",
        "Phase by number: 0 init, 1 train, 2 eval, 3 checkpoint, 4 load, 5 finished.",
        "max",
        compared=False,
    ),
    Metric(
        "train_heartbeat_age_seconds",
        "seconds",
        "rank",
        "timestamp",
        PREFIX + "train_heartbeat_timestamp_seconds",
        "When the process last showed a sign of life from a thread of its own.",
        "max",
        compared=False,
    ),
    Metric(
        "collective_wait_ratio",
        "1",
        "rank",
        "gauge",
        None,
        "Share of time in which the rank waits in collectives, from a step profiler.",
        worse="low",
    ),
    # Error lines of logs in a sliding window
    Metric(
        "log_errors",
        "1",
        "node",
        "gauge",
        PREFIX + "log_window_errors",
        "Error lines in the sliding window, by class.",
        extra_labels=("class",),
        compared=False,
    ),
    Metric("log_hardware_errors", "1", "node", "gauge", None, "Of these, lines that report broken hardware.", compared=False),
    Metric(
        "log_communication_errors",
        "1",
        "node",
        "gauge",
        None,
        "Of these, lines that report a lost or timed-out peer.",
        compared=False,
    ),
    Metric(
        "log_first_error_age_seconds",
        "seconds",
        "node",
        "timestamp",
        PREFIX + "log_first_error_timestamp_seconds",
        "When the first error line of the sliding window was written.",
        "max",
        compared=False,
    ),
)

BY_COLUMN: dict[str, Metric] = {m.column: m for m in CATALOGUE}
BY_SERIES: dict[str, Metric] = {m.series: m for m in CATALOGUE if m.series}


def check_unit(column: str, unit: str, where: str) -> None:
    """Check the unit that some data declare for a column.

    Raises
    ------
    DataError
        The unit is no base unit, or not the one of the catalogue. A name that the catalogue lacks may have any base unit.
    """
    if unit not in UNITS:
        raise DataError(f"{where}: {column} has unit {unit!r}; use one of {', '.join(UNITS)}")
    known = BY_COLUMN.get(column)
    if known and known.unit != unit:
        raise DataError(f"{where}: {column} must be in {known.unit!r}, not {unit!r}; convert it before recording")
