import socket
from pathlib import Path

import pytest

from checkpoint import place


def test_peers() -> None:
    assert place.peers("") == {}
    assert place.peers("node0=10.0.0.1:9480, node1=host.example:1,") == {"node0": "10.0.0.1:9480", "node1": "host.example:1"}


@pytest.mark.parametrize("text", ["node0", "node0=", "node0=host", "node0=host:", "node0=:1", "=host:1", "a=b:c", "a=b:1,c"])
def test_what_is_no_peer_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no peer; write NODE=HOST:PORT,NODE=HOST:PORT"):
        place.peers(text)


def test_the_run_folder_is_the_configured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert place.run_dir() == tmp_path / "eagleeye-cache"
    monkeypatch.setenv("EAGLEEYE_CHECKPOINT__RUN_DIR", str(tmp_path / "other"))
    assert place.run_dir() == tmp_path / "other"
    assert place.run_dir("given") == Path("given")


def test_a_socket_in_a_folder_with_a_very_long_name(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["x" * 100] * 5)
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with place.socket_address(folder) as address:
            server.bind(address)
        server.listen()
        with place.socket_address(folder) as address:
            client.connect(address)
    assert (folder / place.SOCKET).is_socket()


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"address": "a"}', '{"address": "a", "port": null}'])
def test_no_cache_is_no_address(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / place.INFO).write_text(text)
    assert place.local_cache(str(tmp_path)) == ""


def test_an_address_may_tell_what_a_node_fails_together_with() -> None:
    text = "node0=10.0.0.1:9480@rack1/psu2,node1=cache.example:80@rack2,node2=h:1"
    assert place.peers(text) == {"node0": "10.0.0.1:9480@rack1/psu2", "node1": "cache.example:80@rack2", "node2": "h:1"}
    assert place.split("10.0.0.1:9480@rack1/psu2") == ("10.0.0.1", 9480, ("rack1", "psu2"))
    assert place.split("h:1") == ("h", 1, ())
    assert place.split("h:1@") == ("h", 1, ())
    assert place.split("::1:80@r") == ("::1", 80, ("r",))


@pytest.mark.parametrize("address", ["h", ":1", "h:", "h:x", "h:\u0663", "h:1@a//b", "h:1@a/", "h:1@a@b", "h:1@a b", "h@rack:1"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(ValueError, match="write "):
        place.split(address)


def test_a_cache_tells_its_domain_with_its_address(tmp_path: Path) -> None:
    (tmp_path / place.INFO).write_text('{"node": "n", "address": "h", "port": 7, "domain": "rack1/psu2", "pid": 1}')
    assert place.local_cache(str(tmp_path)) == "h:7@rack1/psu2"
    (tmp_path / place.INFO).write_text('{"node": "n", "address": "h", "port": 7, "domain": "", "pid": 1}')
    assert place.local_cache(str(tmp_path)) == "h:7"
