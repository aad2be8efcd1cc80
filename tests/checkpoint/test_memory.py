"""Slabs: what they promise to whoever maps them, how they are counted, and in which pages they lie."""

import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest

from checkpoint import memory
from checkpoint.errors import CannotRun
from checkpoint.memory import Slabs, can_collapse, free_large_pages

MIB = 1 << 20


def small_pages(limit_bytes: int) -> Slabs:
    """Return slabs of a machine that holds no large pages in reserve."""
    return Slabs(limit_bytes, Path("/absent"))


def resident_bytes(file: int) -> int:
    """Return how much memory a memory file occupies: what was never touched occupies none."""
    return os.fstat(file).st_blocks * 512


def test_every_page_of_a_slab_is_there_before_anybody_gets_it() -> None:
    slab = small_pages(1 << 30).take("a", 5 * MIB + 1)
    assert slab.size_bytes == 5 * MIB + mmap.PAGESIZE
    assert resident_bytes(slab.file) == slab.size_bytes
    assert bytes(slab.view(5 * MIB + 1)) == bytes(5 * MIB + 1)


def test_nobody_can_pull_pages_away_from_a_reader() -> None:
    slab = small_pages(1 << 30).take("a", MIB)
    assert fcntl.fcntl(slab.file, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) == 6
    with pytest.raises(PermissionError):
        os.ftruncate(slab.file, 0)


def test_a_slab_is_used_again_by_its_owner_alone() -> None:
    slabs = small_pages(1 << 30)
    slab = slabs.take("a", MIB)
    slabs.give("a", slab)
    assert slabs.take("b", MIB) is not slab
    assert slabs.take("a", MIB // 2 - mmap.PAGESIZE) is not slab  # it would waste more than half of it
    assert slabs.take("a", MIB // 2) is slab
    slab.reusable = False
    slabs.give("a", slab)
    assert slab.discarded


def test_the_limit_is_kept_and_free_slabs_make_room() -> None:
    slabs = small_pages(4 * MIB)
    first, second = slabs.take("a", 2 * MIB), slabs.take("b", 2 * MIB)
    with pytest.raises(CannotRun, match="4096 bytes more do not fit: 4194304 of 4194304 bytes are in use; raise"):
        slabs.take("c", 1)
    slabs.give("a", first)
    slabs.take("c", 1)
    assert (first.discarded, second.discarded, slabs.used_bytes) == (True, False, 2 * MIB + mmap.PAGESIZE)


def test_what_is_made_ahead_is_what_is_lacking_and_is_found_by_its_owner() -> None:
    slabs = small_pages(8 * MIB)
    first = slabs.take("a", 2 * MIB)
    slabs.prepare("a", 2 * MIB, 3, lambda: True)
    assert slabs.used_bytes == 6 * MIB
    numbers = {slabs.take("a", 2 * MIB).number for _ in range(2)}
    assert len(numbers | {first.number}) == 3
    assert slabs.used_bytes == 6 * MIB


def test_whoever_needs_what_is_being_made_ahead_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs, asked, advise = small_pages(1 << 30), [], memory._advise

    def slowly(address: int, size_bytes: int, advice: int) -> int:
        if not asked:
            asked.append(threading.Thread(target=lambda: asked.append(slabs.take("a", 2 * MIB))))
            asked[0].start()
            asked[0].join(0.2)
        return advise(address, size_bytes, advice)

    monkeypatch.setattr(memory, "_advise", slowly)
    slabs.prepare("a", 2 * MIB, 1, lambda: True)
    asked[0].join(10)
    assert (asked[1].number, slabs.used_bytes) == (1, 2 * MIB)


def test_what_is_made_ahead_takes_nothing_from_anybody_and_stays_for_nobody_who_left() -> None:
    slabs = small_pages(5 * MIB)
    free = slabs.take("b", 2 * MIB)
    slabs.give("b", free)
    slabs.prepare("a", 2 * MIB, 9, lambda: True)
    assert (free.discarded, slabs.used_bytes) == (False, 4 * MIB)
    slabs = small_pages(1 << 30)
    answers = iter([True, False, False])  # it leaves while its slab is made
    slabs.prepare("a", 2 * MIB, 9, lambda: next(answers))
    assert slabs.used_bytes == 0


def test_a_memory_file_of_another_cache_keeps_its_bytes_and_is_filled_by_nobody() -> None:
    made = small_pages(1 << 30).take("a", MIB)
    made.map[:5] = b"hello"
    slabs = small_pages(1 << 30)
    adopted = slabs.adopt(os.dup(made.file), made.size_bytes)
    assert bytes(adopted.view(5)) == b"hello"
    assert slabs.used_bytes == MIB
    slabs.give("", adopted)
    assert (adopted.discarded, slabs.used_bytes) == (True, 0)


@pytest.mark.skipif(not can_collapse(), reason="this kernel does not collapse memory files into large pages (Linux 6.1 does)")
def test_pages_become_large_and_the_bytes_stay() -> None:
    slabs = small_pages(1 << 30)
    slab = slabs.take("a", 5 * MIB)
    data = os.urandom(5 * MIB)
    slab.map[: 5 * MIB] = data
    assert not slabs.settle()  # somebody still fills it
    slabs.give("a", slab)
    assert slabs.settle()
    assert (slab.settled, slab.large_bytes, slabs.pages) == (True, 4 * MIB, "4 of 5 MiB in pages of 2 MiB")
    assert bytes(slab.view(5 * MIB)) == data
    assert not slabs.settle()


@pytest.mark.skipif(not can_collapse(), reason="this kernel does not collapse memory files into large pages (Linux 6.1 does)")
def test_whoever_wants_to_fill_a_slab_does_not_wait_until_all_its_pages_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = small_pages(1 << 30)
    slab = slabs.take("a", 64 * MIB)
    slabs.give("a", slab)
    advise = memory._advise

    def wanted_soon(address: int, size_bytes: int, advice: int) -> int:
        assert slabs.take("a", 64 * MIB) is slab
        return advise(address, size_bytes, advice)

    monkeypatch.setattr(memory, "_advise", wanted_soon)
    slabs.settle()
    assert (slab.settled, slab.large_bytes) == (False, 16 * MIB)
    monkeypatch.setattr(memory, "_advise", advise)
    slabs.give("a", slab)
    assert slabs.settle()
    assert (slab.settled, slab.large_bytes) == (True, 64 * MIB)


def test_a_kernel_that_cannot_make_large_pages_leaves_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_COLLAPSE", 250)  # no advice: EINVAL, as an older kernel answers
    assert not can_collapse()
    slabs = small_pages(1 << 30)
    slab = slabs.take("a", 4 * MIB)
    slabs.give("a", slab)
    assert slabs.settle()
    assert (slab.settled, slab.large_bytes) == (True, 0)


def test_a_kernel_that_cannot_populate_by_advice_gets_every_page_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 251)
    slab = small_pages(1 << 30).take("a", 3 * MIB)
    assert resident_bytes(slab.file) == 3 * MIB


def test_a_reserve_that_is_too_small_or_a_lie_is_no_obstacle(tmp_path: Path) -> None:
    for free, reserved, pages in (("0", "0", 0), ("1000", "1000", 0), ("100000", "0", 100_000), ("many", "0", 0)):
        (tmp_path / "free_hugepages").write_text(f"{free}\n")
        (tmp_path / "resv_hugepages").write_text(f"{reserved}\n")
        assert free_large_pages(tmp_path) == pages
        slab = Slabs(1 << 30, tmp_path).take("a", 4 * MIB)  # where the machine has fewer than it says, small pages
        assert slab.size_bytes == 4 * MIB
        assert bytes(slab.view(4)) == bytes(4)
    assert free_large_pages(tmp_path / "absent") == 0


@pytest.mark.skipif(free_large_pages() < 2, reason="the machine has no free 2 MiB pages in reserve (vm.nr_hugepages)")
def test_pages_of_the_reserve_are_used_first() -> None:
    slabs = Slabs(1 << 30)
    slab = slabs.take("a", 3 * MIB)
    assert (slab.size_bytes, slab.large_bytes, slab.settled) == (4 * MIB, 4 * MIB, True)
    slab.map[: 3 * MIB] = b"x" * (3 * MIB)
    assert bytes(slab.view(3 * MIB)) == b"x" * (3 * MIB)
    assert slabs.take("a", 100_000).large_bytes == 0  # most of a large page would be wasted


def test_many_threads_that_take_and_give_never_share_a_slab_nor_pass_the_limit() -> None:
    slabs, held, wrong = small_pages(16 * MIB), set(), []
    lock = threading.Lock()

    def work(owner: str) -> None:
        for _ in range(50):
            try:
                slab = slabs.take(owner, MIB)
            except CannotRun:
                continue
            with lock:
                if slab in held or slabs.used_bytes > slabs.limit_bytes:
                    wrong.append(slab)
                held.add(slab)
            with lock:
                held.remove(slab)
            slabs.give(owner, slab)

    threads = [threading.Thread(target=work, args=(f"{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert slabs.used_bytes <= 16 * MIB
