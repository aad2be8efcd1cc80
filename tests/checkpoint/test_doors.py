"""The lock, the sockets and the run folder of a cache: who gets in, who is shown out, and what lies in the way."""

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpoint import place
from checkpoint.doors import Doors, opened
from checkpoint.errors import CannotRun
from eagleeye.cli import main


@pytest.fixture
def doors(tmp_path: Path) -> Doors:
    """Doors behind which an echo answers."""
    made = opened(tmp_path / "run", "127.0.0.1", 0)

    def echo(sock: socket.socket) -> None:
        while words := sock.recv(100):
            sock.sendall(words)

    for listener in (made.tcp, made.unix):
        threading.Thread(target=made.accept, args=(listener, echo, print), daemon=True).start()
    return made


def connected(run_dir: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    with place.socket_address(run_dir) as address:
        sock.connect(address)
    return sock


def heard(sock: socket.socket, words: bytes) -> bytes:
    sock.sendall(words)
    return sock.recv(100)


def test_both_sockets_are_answered(doors: Doors, tmp_path: Path) -> None:
    with socket.create_connection(("127.0.0.1", doors.port), 10) as tcp, connected(tmp_path / "run") as unix:
        assert (heard(tcp, b"one"), heard(unix, b"two")) == (b"one", b"two")


def test_a_second_cache_is_kept_out_and_told_by_whom(doors: Doors, tmp_path: Path) -> None:
    doors.announce(tmp_path / "run", {"node": "n"})
    with pytest.raises(CannotRun, match=rf"a cache \(pid {os.getpid()}\) runs in .*/run already; one serves all jobs of a node"):
        opened(tmp_path / "run", "127.0.0.1", 0)
    with pytest.raises(CannotRun, match=rf"cannot listen on 127.0.0.1, port {doors.port}: Address already in use"):
        opened(tmp_path / "other", "127.0.0.1", doors.port)
    opened(tmp_path / "other", "127.0.0.1", 0).close()  # the failed one let go of its lock


def test_shut_doors_show_everybody_out_but_one_and_make_others_wait_until_they_are_open(doors: Doors, tmp_path: Path) -> None:
    with connected(tmp_path / "run") as stays:
        assert heard(stays, b"x") == b"x"
        (kept,) = doors._inside
        out = connected(tmp_path / "run")
        assert heard(out, b"x") == b"x"
        assert doors.shut(kept, 10)
        with out:
            assert out.recv(1) == b""
        assert heard(stays, b"y") == b"y"
        with connected(tmp_path / "run") as late:
            late.sendall(b"z")
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.recv(1)
            late.settimeout(10)
            doors.reopen()
            assert late.recv(1) == b"z"
        assert heard(stays, b"still here") == b"still here"


def test_another_process_that_has_the_same_socket_may_take_the_connection(doors: Doors, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        doors.shut(nobody, 0)
    files = [os.dup(file) for file in doors.files]
    other = Doors(files[0], socket.socket(fileno=files[1]), socket.socket(fileno=files[2]))
    threading.Thread(target=other.accept, args=(other.unix, lambda sock: sock.sendall(b"the other"), print), daemon=True).start()
    with connected(tmp_path / "run") as sock:
        assert sock.recv(100) == b"the other"


@pytest.mark.parametrize("name", [place.SOCKET, place.LOCK, place.INFO, place.INDEX])
def test_a_foreign_folder_where_a_file_should_be_is_one_sentence(
    tmp_path: Path, name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / name / "somebody's").mkdir(parents=True)
    assert main(["cache", "--run-dir", "run", "--port", "0", "--address", "127.0.0.1"]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("eagleeye cache: the cache cannot use run: ")
    assert len(told.err.splitlines()) == 1
    assert (tmp_path / "run" / name / "somebody's").exists()
