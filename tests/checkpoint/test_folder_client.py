"""Files of a folder through real caches: saved whole or not at all, and written back byte by byte."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import CacheGone, CannotRun, CheckpointError, Corrupt, UsageError
from checkpoint.files import Changed, Entry, FolderClient, entries, write
from checkpoint.listing import table
from checkpoint.manifest import Generation, Key, Manifest, made_of


def gen(step: int, attempt: int = 1) -> Generation:
    return Generation(attempt, step, "0a1b2c3d")


def fill(folder: Path, **files: bytes) -> dict[str, os.stat_result]:
    """Write files, ``__`` for a slash; return them as `save` wants them."""
    found = {}
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        found[name.replace("__", "/")] = path.lstat()
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()}


def made(data: bytes, *listed: Entry) -> Manifest:
    """Return the manifest of a shard that no honest client would have saved."""
    content = {"items": "files", "values": [list(entry) for entry in listed]}
    return made_of(Key("job.files", gen(1), 0), 1, "node0", content, memoryview(data))


def never(path: str) -> None:
    raise AssertionError(f"{path} was moved aside")


def test_every_node_gets_its_own_files_back(three: Any, tmp_path: Path, poll: Callable[..., Any]) -> None:
    clients = [FolderClient("own.files", rank, 3, three[rank].run_dir) for rank in range(3)]
    big = os.urandom((9 << 20) + 17)
    for rank, client in enumerate(clients):
        folder = tmp_path / f"from{rank}"
        files = fill(folder, a__b__x=big[rank:], empty=b"", latest=b"7")
        (folder / "a" / "b" / "x").chmod(0o640)
        (folder / "link").symlink_to("a/b/x")
        files |= {"a/b/x": (folder / "a/b/x").lstat(), "link": (folder / "link").lstat()}
        client.save(gen(7), folder, files if rank < 2 else {})
    chosen = poll(lambda: (c := clients[0].choose()).generation and c)
    assert (chosen.generation, chosen.unreached) == (str(gen(7)), ())
    assert chosen.attempt > 1, "the next start gets a number of its own"
    for rank, client in enumerate(clients):
        fetched = client.fetch(chosen.generation)
        assert (fetched.source, fetched.holder) == ("local", f"node{rank}")
        to = tmp_path / f"to{rank}"
        written = write(fetched.manifest, fetched.data, to, never)
        client.release()
        if rank == 2:
            assert (written, tree(to)) == ([], {})
            continue
        assert written == ["a/b/x", "empty", "latest", "link"]
        assert tree(to) == tree(tmp_path / f"from{rank}")
        assert os.readlink(to / "link") == "a/b/x"
        assert (to / "a/b/x").stat().st_mode & 0o777 == 0o640
    with pytest.raises(UsageError, match="step 7 was saved already by rank 0"):
        clients[0].save(gen(7), tmp_path, {})
    assert (chosen.existed, clients[0].choose(exclude=[str(gen(7))]).existed) == (str(gen(7)), None)
    for client in clients:
        client.close()


def test_the_next_node_has_a_copy(cluster: Any, tmp_path: Path, poll: Callable[..., Any]) -> None:
    nodes = cluster(3, storage=None)
    files = fill(tmp_path / "from", step_5=os.urandom(300_000))
    for rank in range(2):
        FolderClient("lost.files", rank, 2, nodes[rank].run_dir).save(gen(5), tmp_path / "from", files)
    spare = FolderClient("lost.files", 0, 2, nodes[2].run_dir)
    poll(lambda: spare.choose().generation)
    poll(lambda: copy_of(nodes[0].run_dir, "lost.files") == "node1")
    nodes[0].kill()
    fetched = spare.fetch(spare.choose().generation or "")
    assert (fetched.source, fetched.holder) == ("neighbour", "node1")
    write(fetched.manifest, fetched.data, tmp_path / "to", never)
    assert tree(tmp_path / "to") == tree(tmp_path / "from")


def copy_of(run_dir: str, job: str) -> str:
    """Return on which node the copy of the shard is that was saved here, as `eagleeye cache list` tells."""
    found = [line.split() for line in table(Path(run_dir)).splitlines() if line.startswith(job)]
    return found[0][6] if found else ""


def test_only_what_is_absent_or_differs_is_written(tmp_path: Path) -> None:
    data = b"aaabbbccc"
    manifest = made(data, *(Entry(f"d/{name}", 3 * i, 3, 0o100644) for i, name in enumerate("abc")))
    folder, aside = tmp_path / "to", tmp_path / "aside"
    fill(folder, d__a=b"aaa", d__b=b"old", e=b"stays")
    before = (folder / "d/a").stat().st_ino
    aside.mkdir()
    moved = []

    def put_aside(path: str) -> None:
        moved.append(path)
        (folder / path).rename(aside / Path(path).name)

    assert write(manifest, memoryview(data), folder, put_aside) == ["d/b", "d/c"]
    assert tree(folder) == {"d/a": b"aaa", "d/b": b"bbb", "d/c": b"ccc", "e": b"stays"}
    assert (moved, tree(aside)) == (["d/b"], {"b": b"old"})
    assert (folder / "d/a").stat().st_ino == before
    assert write(manifest, memoryview(data), folder, never) == []


def test_a_file_that_changes_is_not_saved(three: Any, tmp_path: Path) -> None:
    client = FolderClient("changed.files", 0, 1, three[0].run_dir)
    found = fill(tmp_path, step_1=b"first")
    (tmp_path / "step_1").write_bytes(b"later")
    os.utime(tmp_path / "step_1", ns=(0, found["step_1"].st_mtime_ns + 1))
    with pytest.raises(Changed, match="was changed while it was being saved"):
        client.save(gen(1), tmp_path, found)
    (tmp_path / "step_1").unlink()
    with pytest.raises(Changed, match="cannot be read any more: No such file"):
        client.save(gen(1), tmp_path, found)
    assert client.choose().existed is None
    client.save(gen(1), tmp_path, fill(tmp_path, step_1=b"at last"))
    assert bytes(client.fetch(str(gen(1))).data) == b"at last"
    client.close()


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a/./b", "a//b", "a/", "a\0b"])
def test_a_path_that_leads_elsewhere_is_refused(three: Any, tmp_path: Path, path: str) -> None:
    with pytest.raises(Corrupt, match="no path of a file below a folder"):
        write(made(b"x", Entry(path, 0, 1, 0o100644)), memoryview(b"x"), tmp_path / "to", never)
    client = FolderClient("paths.files", 0, 1, three[0].run_dir)
    with pytest.raises(UsageError, match="no path of a file below a folder"):
        client.save(gen(1), tmp_path, {path: tmp_path.lstat()})
    client.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        ([Entry("a", 0, 2, 0o100644)], "a does not fit into 1 bytes"),
        ([Entry("a", -1, 1, 0o100644)], "a does not fit into 1 bytes"),
        ([Entry("a", 0, 1, 0o040755)], "a is neither a file nor a link"),
        ([Entry("a", 0, 1, 0o100644), Entry("a", 0, 0, 0o100644)], "names one twice"),
        ([Entry("a", 0, 1, 0o100644), Entry("a/b", 0, 1, 0o100644)], "names one twice"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(listed: list[Entry], sentence: str) -> None:
    with pytest.raises(Corrupt, match=sentence):
        entries(made(b"x", *listed))


def test_a_shard_of_tensors_is_no_shard_of_files(three: Any) -> None:
    torch = pytest.importorskip("torch")
    handle = three[0].client(job="tensors").save(1, {"w": torch.zeros(3)})
    handle.wait("cached", 10)
    client = FolderClient("tensors", 0, 1, three[0].run_dir)
    with pytest.raises(Corrupt, match="it was saved by another client"):
        client.fetch(handle.generation)
    client.close()


def test_a_link_in_the_folder_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "d").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotRun, match="d is a link"):
        write(made(b"x", Entry("d/a", 0, 1, 0o100644)), memoryview(b"x"), tmp_path / "to", never)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    data = b"s" * 500 + b"b" * 5000
    manifest = made(data, Entry("small", 0, 500, 0o100644), Entry("new/big", 500, 5000, 0o100644))
    fill(tmp_path / "to", small=b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a full disk: no file grows beyond 1000 bytes
    try:
        with pytest.raises(CannotRun, match=r"^cannot write \S+/to/new/big: File too large; make \S+/to writable, with room"):
            write(manifest, memoryview(data), tmp_path / "to", never)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["to", "to/small"]
    assert (tmp_path / "to/small").read_bytes() == b"old"


def test_bytes_that_changed_in_memory_meanwhile_are_not_put_in_place(tmp_path: Path) -> None:
    manifest = made(b"good", Entry("a", 0, 4, 0o100644))
    fill(tmp_path / "to", a=b"old")
    with pytest.raises(Corrupt, match="are not those that were saved"):
        write(manifest, memoryview(b"evil"), tmp_path / "to", never)
    assert tree(tmp_path / "to") == {"a": b"old"}
    with pytest.raises(Corrupt, match="0 bytes instead of 4"):
        write(replace(manifest), memoryview(b""), tmp_path / "to", never)


def test_a_cache_that_dies_and_comes_back(cluster: Any, tmp_path: Path) -> None:
    nodes = cluster(1, storage=None)
    client = FolderClient("back.files", 0, 1, nodes[0].run_dir)
    files = fill(tmp_path, step_1=b"one")
    client.save(gen(1), tmp_path, files)
    nodes[0].kill()
    with pytest.raises(CacheGone, match=r"went away|ended|no cache answers"):
        client.save(gen(2), tmp_path, files)
    with pytest.raises(CacheGone, match=r"no cache answers in .*; start `eagleeye cache` on this node"):
        client.connect(0.0)
    nodes[0].start().ready()
    client.save(gen(2), tmp_path, files)
    assert client.choose().generation == str(gen(2))
    client.close()


def test_a_cache_without_room_says_so(cluster: Any, tmp_path: Path) -> None:
    nodes = cluster(1, "--memory-bytes", "1MiB", storage=None)
    client = FolderClient("large.files", 0, 1, nodes[0].run_dir)
    with pytest.raises(CannotRun, match=r"can never hold a save of 3000000 bytes: .* raise \[checkpoint\] memory_bytes"):
        client.save(gen(1), tmp_path, fill(tmp_path, x=b"x" * 3_000_000), timeout_s=600.0)
    client.save(gen(1), tmp_path, fill(tmp_path, x=b"x" * 300_000))
    assert client.choose().generation == str(gen(1))
    client.close()


def test_it_does_without_torch() -> None:
    program = "import sys, checkpoint.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_no_rank_no_shard(three: Any) -> None:
    with pytest.raises(UsageError, match="there is no rank 3 among 3"):
        FolderClient("j", 3, 3)
    client = FolderClient("nothing.files", 0, 1, three[0].run_dir)
    first, second = client.choose(), client.choose()
    assert (first.generation, first.existed, first.passed_over, first.unreached) == (None, None, (), ())
    assert second.attempt > first.attempt, "no two starts share a number"
    with pytest.raises(CheckpointError, match="step 1 of rank 0 cannot be restored: no copy"):
        client.fetch(str(gen(1)))
    client.close()
