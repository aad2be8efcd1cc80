"""The benchmark of the checkpoint engine: its arithmetic, its throttle and its pump, and the script itself on tiny states."""

import io
import json
import mmap
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_ratios
import pytest
import torch
from pump import pump, shares

SCRIPT = Path(checkpoint_ratios.__file__)
ISSUED = {
    "save_large_vs_memcpy", "save_mix_vs_memcpy", "save_small_vs_memcpy", "save_overlapped_vs_memcpy", "torch_save_fsync_vs_save",
    "torch_save_throttled_vs_save", "dcp_async_vs_save", "dcp_async_reused_vs_save", "torchsnapshot_vs_save",
    "torch_checkpointing_vs_save", "lm_resiliency_vs_save", "restore_vs_memcpy", "torch_load_cached_vs_restore",
    "torch_load_throttled_vs_restore", "replicate_vs_pump", "neighbour_restore_vs_pump", "flush_vs_odirect",
}  # fmt: skip


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, check=False)


def test_every_ratio_has_a_part_that_finds_it() -> None:
    assert set(checkpoint_ratios.KEYS) == ISSUED
    assert set(checkpoint_ratios.KEYS.values()) == set(checkpoint_ratios.PARTS)


def test_a_pair_is_the_first_time_over_the_second() -> None:
    found = checkpoint_ratios.Found()
    found.pair("key", 3.0, 2.0)
    found.pair("key", 1.0, 2.0)
    assert found.ratios == {"key": [1.5, 0.5]}
    assert [checkpoint_ratios.significant(x) for x in (1.23456, 0.0012345, 234.56)] == [1.23, 0.00123, 235.0]


def test_a_throttled_file_lets_no_more_pass_and_changes_nothing() -> None:
    state, file = {"w": torch.arange(50_000.0)}, io.BytesIO()
    began_s = time.monotonic()
    torch.save(state, checkpoint_ratios.Throttled(file, 1e6))
    assert time.monotonic() - began_s >= 0.2  # 200 kB at 1 MB/s
    file.seek(0)
    began_s = time.monotonic()
    loaded = torch.load(checkpoint_ratios.Throttled(file, 1e6), weights_only=True)
    assert time.monotonic() - began_s >= 0.2
    assert torch.equal(loaded["w"], state["w"])


def test_a_pump_moves_all_bytes_again_and_again() -> None:
    assert shares(10, 3) == [3, 3, 4]
    with pump(10_000_001, 3) as send:
        assert all(send() > 0 for _ in range(3))


def test_the_states_are_what_the_page_says() -> None:
    large, small = (make(checkpoint_ratios.FULL) for make in (checkpoint_ratios.large_state, checkpoint_ratios.small_state))
    assert {tensor.nbytes for tensor in large.values()} == {4 << 20}
    assert {tensor.nbytes for tensor in small.values()} == {16 << 10}
    mix = checkpoint_ratios.mix_state(checkpoint_ratios.QUICK)
    assert {"exp_avg", "exp_avg_sq", "step"} == set(mix["optimizer"]["state"][0])


def test_a_plain_writer_writes_what_it_is_given(tmp_path: Path) -> None:
    memory = mmap.mmap(-1, 16 * 4096)
    memory.write(b"0123456789abcdef" * 4096)
    checkpoint_ratios.written(tmp_path / "plain", memory, piece_bytes=3 * 4096)
    assert (tmp_path / "plain").read_bytes() == memory[:]


def test_a_peer_that_is_not_installed_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"^no_such_peer cannot be imported \(.*\): run `make bench-checkpoint`, or pip install"):
        checkpoint_ratios.need("no_such_peer")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["save_large_vs_memcpy", "save_overlapped_vs_memcpy"],
        ["dcp_async_reused_vs_save"],
        ["restore_vs_memcpy", "torch_load_cached_vs_restore", "torch_load_throttled_vs_restore"],
        ["replicate_vs_pump"],
        ["neighbour_restore_vs_pump"],
        ["flush_vs_odirect"],
    ],
)
def test_the_script_itself(tmp_path: Path, keys: list[str]) -> None:
    out = tmp_path / "checkpoint.json"
    out.write_text(json.dumps({"ratios": {"kept": 7}, "spread": {"kept": [6, 8]}, "details": {"kept": {}}}))
    done = run("--quick", "--out", str(out), "--only", *keys)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(result) == {"commit", "machine", "ratios", "spread", "details"}
    assert set(result["ratios"]) == set(result["spread"]) == {"kept", *keys}
    for key in keys:
        low, high = result["spread"][key]
        assert 0 < low <= result["ratios"][key] <= high
        assert result["details"][key]["pairs"] >= 2


def test_the_committed_result_has_all_keys() -> None:
    result = json.loads(checkpoint_ratios.RESULT.read_text(encoding="utf-8"))
    assert set(result["ratios"]) == set(result["spread"]) == ISSUED
    assert all(result["details"][key]["pairs"] >= 5 for key in ISSUED)
    assert all(low <= result["ratios"][key] <= high for key, (low, high) in result["spread"].items())
