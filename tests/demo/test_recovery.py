"""How the demo reads what the ranks print, and when it says that the job went on unharmed."""

import importlib.util
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "demo"


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, DEMO / f"{name}.py")
        assert spec
        assert spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


cluster, recovery = load("cluster"), load("recovery")
AT_S = datetime.fromisoformat("2026-11-30T02:35:20+00:00").timestamp()


def line(offset_s: float, text: str) -> str:
    minutes, seconds = divmod(20 + offset_s, 60)
    return f"2026-11-30T02:{35 + int(minutes):02d}:{seconds:09.6f}Z {text}\n"


def first_round(rank: int) -> str:
    steps = [line(step, f"step {step} loss {10 - step}") for step in range(1, 6)]
    return (
        line(0, f"rank {rank} of 2, 9 bytes, 7 parameters")
        + "".join(steps[:4])
        + line(4.5, "saved step 4, parameters aa4")
        + steps[4]
    )


def second_round(rank: int, source: str, loss_6: float = 4, save_6: str = "aa6") -> str:
    return (
        line(30, f"rank {rank} of 2, 9 bytes, 7 parameters")
        + line(31, f"restored step 4 from {source} in 0.250 s, parameters aa4")
        + line(32 + rank, "step 5 loss 5")
        + line(34, f"step 6 loss {loss_6}")
        + line(35, f"saved step 6, parameters {save_6}")
    )


UNBROKEN = recovery.Unbroken({step: float(10 - step) for step in range(1, 9)}, {4: "aa4", 6: "aa6", 8: "aa8"})


def told(folder: Path, **changes: object) -> object:
    """What is told of a job of two ranks whose node1 was replaced by node2."""
    logs = {
        "node0": "eagleeye launch [node0]: round 1 starts\n"
        + first_round(0)
        + "[rank0]: Traceback\n"
        + second_round(0, "local node0", **changes),
        "node1": first_round(1) + "eagleeye launch [node1]: this node was taken out\n",
        "node2": second_round(1, "neighbour node0"),
    }
    nodes = []
    for number, (name, text) in enumerate(logs.items()):
        (folder / name).write_text(text)
        nodes.append(cluster.Node(name, number, number == 2, folder / name, "", "", 0, 0))
    return recovery.recovery(nodes, 2, "node1", AT_S + 5, AT_S + 10, AT_S + 12, AT_S + 15, UNBROKEN)


def test_a_job_that_went_on_bit_for_bit(tmp_path: Path) -> None:
    healed = told(tmp_path)
    assert healed is not None
    assert (healed.evicted, healed.spare, healed.restored_step, healed.lost_steps) == ("node1", "node2", 4, 1)
    phases = {name: round(took_s, 3) for name, took_s in healed.phases}
    assert phases == {"detect": 5, "plan": 2, "stop": 3, "start": 15, "restore": 1, "first step": 2}
    assert [(r.rank, r.node, r.source, r.holder, r.restore_s) for r in healed.restores] == [
        (0, "node0", "local", "node0", 0.25),
        (1, "node2", "neighbour", "node0", 0.25),
    ]
    assert healed.loss == {step: 10.0 - step for step in range(1, 7)}
    assert healed.saves == [(6, "aa6", "aa6")]
    assert healed.identical


@pytest.mark.parametrize("changes", [{"loss_6": 4.000001}, {"save_6": "bb6"}])
def test_the_smallest_difference_is_told(tmp_path: Path, changes: dict[str, object]) -> None:
    assert told(tmp_path, **changes).identical is False


def test_no_recovery_without_every_rank(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(first_round(0) + second_round(0, "local node0"))
    node = cluster.Node("node0", 0, False, tmp_path / "log", "", "", 0, 0)
    assert recovery.recovery([node], 2, "node1", AT_S, AT_S, AT_S + 12, AT_S, UNBROKEN) is None
    assert recovery.newest([node], AT_S + 12, 1)[0].saves == {6: "aa6"}
    assert recovery.newest([node], AT_S + 31, 1) == []


def test_an_unbroken_run_is_kept_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "UNBROKEN", tmp_path / "unbroken")
    asked = []

    def run(steps: int, ranks: int, run_dir: Path) -> object:
        asked.append(steps)
        return recovery.Unbroken({step: 1 / step for step in range(1, steps + 1)}, {25: "aa"})

    monkeypatch.setattr(recovery, "_run_unbroken", run)
    first = recovery.unbroken(130, 4, tmp_path)
    assert asked == [300]
    assert recovery.unbroken(300, 4, tmp_path) == first
    assert asked == [300]
    recovery.unbroken(301, 4, tmp_path)
    recovery.unbroken(10, 3, tmp_path)
    assert asked == [300, 500, 200]
