"""Devices and TCP of a network namespace, from files and from this machine."""

import contextlib
import shutil
import socket
from pathlib import Path

import pytest

from eagleeye.collect.network import NetworkCollector, SendQueue, send_queue_bytes
from eagleeye.errors import NoData


def test_recorded_node(bench) -> None:
    # enp2s0 is a free socket, docker0 a bridge, lo nobody's
    found = bench.values(NetworkCollector(bench.site(proc_root=str(bench.files / "proc"), sys_root=str(bench.files / "sys"))))
    assert found == {
        "network_receive_bytes_total": {("enp1s0",): 123456789.0, ("enp3s0",): 77777.0},
        "network_transmit_bytes_total": {("enp1s0",): 987654321.0, ("enp3s0",): 66666.0},
        "network_errors_total": {("enp1s0",): 10.0, ("enp3s0",): 0.0},
        "network_up": {("enp1s0",): 1.0, ("enp3s0",): 0.0},
        "network_tcp_retransmits_total": {(): 4711.0},
        "network_tcp_send_queue_bytes": {(): 4096.0 + 256.0},
    }


def test_without_physical_devices_all_but_loopback_count(bench, tmp_path: Path) -> None:
    found = bench.values(NetworkCollector(bench.site(proc_root=str(bench.files / "proc"), sys_root=str(tmp_path))))
    assert set(found["network_receive_bytes_total"]) == {("enp1s0",), ("enp3s0",), ("docker0",)}
    assert "network_up" not in found


def test_only_loopback_is_no_data(bench, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    lines = (bench.files / "proc" / "net" / "dev").read_text().splitlines()
    (tmp_path / "net" / "dev").write_text("\n".join(lines[:3]) + "\n")
    collector = NetworkCollector(bench.site(proc_root=str(tmp_path)))
    assert collector.supported()
    with pytest.raises(NoData, match="loopback"):
        list(collector.collect(0.0))


def test_unreadable_tcp_files_lose_only_their_series(bench, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    shutil.copy(bench.files / "proc" / "net" / "dev", tmp_path / "net")
    (tmp_path / "net" / "snmp").write_text("Tcp: A B\nTcp: 1\n")
    found = bench.values(NetworkCollector(bench.site(proc_root=str(tmp_path), sys_root=str(bench.files / "sys"))))
    assert set(found) == {"network_receive_bytes_total", "network_transmit_bytes_total", "network_errors_total", "network_up"}


def test_no_network_at_all(bench, tmp_path: Path) -> None:
    assert not NetworkCollector(bench.site(proc_root=str(tmp_path))).supported()


def test_mean_of_the_send_queue_since_the_last_look(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SendQueue, "PERIOD_S", 3600.0)
    queue = SendQueue(bench.site(proc_root=str(bench.files / "proc")))
    bench.wait_for(lambda: queue.mean_bytes.take() == 4352.0)
    queue.mean_bytes.look(1000.0)
    queue.mean_bytes.look(2000.0)
    assert queue.mean_bytes.take() == 1500.0
    assert queue.mean_bytes.take() == 1500.0
    monkeypatch.setattr(queue.mean_bytes, "REPEAT_S", 0.0)
    assert queue.mean_bytes.take() is None


def test_send_queue_of_a_real_connection_whose_peer_reads_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += client.send(bytes(1 << 16))
            # the kernel counts what it took, in the queue of the sender and in that of the peer that reads nothing
            ends = [f"0100007F:{end[1]:04X}" for end in (client.getsockname(), client.getpeername())]
            [mine] = [line for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[1:3] == ends]
            as_if_remote = mine.replace(" 0100007F", " 0600000A").replace(" 0600000A", " 0500000A", 1)
            assert send_queue_bytes("header\n" + mine) == 0
            assert 0 < send_queue_bytes("header\n" + as_if_remote) <= sent


def test_this_machine(bench) -> None:
    collector = NetworkCollector(bench.site())
    try:
        found = bench.values(collector)
    except NoData:
        pytest.skip("this machine has loopback only")
    assert ("lo",) not in found["network_receive_bytes_total"]
    assert set(found["network_up"].values()) <= {0.0, 1.0}
    assert found["network_tcp_send_queue_bytes"][()] >= 0
