"""The proof of safety: thousands of schedules of faults against real caches and ranks, judged by an oracle outside the engine.

``make chaos`` runs `SCHEDULES` of them. CHAOS_SEED chooses another campaign, CHAOS_N its size, CHAOS_ONLY runs one schedule
again: its number, or the plan that was printed when it failed. See `benchmarks/README.md`.
"""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import chaos_plan
from chaos_faults import end_with_parent
from chaos_oracle import KINDS, summary
from chaos_plan import Plan
from chaos_ranks import Nursery
from chaos_schedule import Outcome, carry_out
from provenance import provenance

SCHEDULES = 10_000
REAL_PART, REAL_FIRST = 20, 3
"""One schedule in so many, and the first ones, are real: caches are started by the command and no clock is quicker than life."""
JOBS = 5 * len(os.sched_getaffinity(0))
"""Schedules at a time: most of one is waiting."""
RESULT = Path(__file__).parent / "results" / "chaos.json"
_SHRINK_RUNS = 15
_SAY_S = 5.0
_SHOWN = 3


def main() -> int:
    """Run the campaign, or one schedule of it again; print what was found, last a line of JSON."""
    seed, count, only = (os.environ.get(name, "") for name in ("CHAOS_SEED", "CHAOS_N", "CHAOS_ONLY"))
    if only:
        plan = chaos_plan.read(only) if only.startswith("{") else draw(int(seed or 0), int(only))
        return again(plan)
    campaign = Campaign(int(seed or 0), [draw(int(seed or 0), index) for index in range(int(count or SCHEDULES))])
    campaign.run()
    print(table(campaign.restores))
    with Nursery() as nursery:
        for outcome in campaign.failed[:_SHOWN]:
            print("", *outcome.log, f"CHAOS_ONLY='{shrunk(outcome, nursery).plan.text()}' make chaos", sep="\n  ")
    if campaign.errors:
        print(f"{len(campaign.errors)} schedules could not be carried out:", *campaign.errors[:_SHOWN], sep="\n")
    last = campaign.last_line()
    if (seed, count) == ("", ""):
        told = {**provenance(), **last, "minutes": round(campaign.minutes, 1), "faults": rows(campaign.restores)}
        RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(last))
    return 1 if campaign.errors or any(last[kind] for kind in KINDS) else 0


def draw(seed: int, index: int) -> Plan:
    """Return a schedule of a campaign."""
    return chaos_plan.draw(seed, index, real=index % REAL_PART == 0 or index < REAL_FIRST)


def again(plan: Plan) -> int:
    """Carry out one plan and print all of it; what lay in its folder stays when something was violated."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with Nursery() as nursery:
        outcome = carry_out(plan, folder / "one", nursery, keep=True)
    print(plan.text(), *outcome.log, sep="\n")
    if outcome.violations:
        print(f"logs, indices and storage are in {folder}")
    real = int(plan.real)
    print(json.dumps({"seed": plan.seed, "schedules": 1, "real": real, **summary(outcome.violations)}))
    return 1 if outcome.violations else 0


class Campaign:
    """Many plans, several at a time.

    Parameters
    ----------
    change : called before all else in each process that carries out plans; a test breaks the engine with it
    """

    def __init__(self, seed: int, plans: Sequence[Plan], change: Callable[[], None] | None = None) -> None:
        self._seed, self._plans, self._change = seed, plans, change
        self.done = self.real = 0
        self.minutes = 0.0
        self.restores: Counter[str] = Counter()
        self.failed: list[Outcome] = []
        self.errors: list[str] = []

    def run(self) -> None:
        """Carry them all out, and say every few seconds how far it is. SIGINT ends it with what was done until then."""
        began_s = said_s = time.monotonic()
        fork = multiprocessing.get_context("fork")
        with Nursery(self._change) as nursery, ProcessPoolExecutor(JOBS, fork, _begin, (nursery, self._change)) as pool:
            try:
                for future in as_completed([pool.submit(_one, plan) for plan in self._plans]):
                    self._take(future.result())
                    if time.monotonic() - said_s > _SAY_S:
                        said_s = time.monotonic()
                        rate = self.done / (said_s - began_s)
                        left_min = (len(self._plans) - self.done) / rate / 60
                        told = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in self.found().items())
                        where = f"{self.done}/{len(self._plans)} schedules, {rate:.1f}/s, {left_min:.0f} min to go"
                        print(f"{where}: {told}", flush=True)
            except KeyboardInterrupt:
                print(f"stopped after {self.done} of {len(self._plans)} schedules", flush=True)
                pool.shutdown(cancel_futures=True)
        self.minutes = (time.monotonic() - began_s) / 60

    def _take(self, done: Outcome | str) -> None:
        if isinstance(done, str):
            self.errors.append(done)
            return
        self.done += 1
        self.real += done.plan.real
        self.restores.update(done.restores)
        if done.violations:
            self.failed.append(done)
            print(f"schedule {done.plan.seed}: {done.violations[0].what}", flush=True)

    def found(self) -> dict[str, int]:
        """Return the count of each kind of violation."""
        return dict(summary([violation for outcome in self.failed for violation in outcome.violations]))

    def last_line(self) -> dict[str, int]:
        """Return what the last line of output tells."""
        return {"seed": self._seed, "schedules": self.done, "real": self.real, **self.found()}


_nursery: Nursery
"""Of a process of the pool."""


def _begin(nursery: Nursery, change: Callable[[], None] | None) -> None:
    global _nursery
    _nursery = nursery
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever stops the campaign lets the schedules that run end
    if change is not None:
        change()
    gc.freeze()  # a collection in a forked process would copy all that it shares with this one


def _one(plan: Plan) -> Outcome | str:
    # files in memory, but for real schedules, which shall wait for a disk as life does
    base = None if plan.real or not os.path.isdir("/dev/shm") else "/dev/shm"
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=base))
    try:
        return carry_out(plan, folder / "one", _nursery)
    except Exception:
        return f"schedule {plan.seed}: {traceback.format_exc()}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shrunk(outcome: Outcome, nursery: Nursery) -> Outcome:
    """Return a shorter plan that violates the same, found by leaving out one thing after the other."""
    kind, folder = outcome.violations[0].kind, Path(tempfile.mkdtemp(prefix="chaos-"))
    best, at, left = outcome, len(outcome.plan.ops) - 1, _SHRINK_RUNS
    while at >= 0 and left > 0:
        left -= 1
        shorter = replace(best.plan, ops=best.plan.ops[:at] + best.plan.ops[at + 1 :])
        tried = carry_out(shorter, folder / str(left), nursery)
        if any(violation.kind == kind for violation in tried.violations):
            best = tried
        at -= 1
    shutil.rmtree(folder, ignore_errors=True)
    return best


def rows(restores: Counter[str]) -> dict[str, dict[str, int]]:
    """Return how restores ended, by the fault that went before."""
    found: dict[str, dict[str, int]] = {}
    for key in sorted(restores):
        fault, _, ended = key.partition("|")
        found.setdefault(fault, {})[ended] = restores[key]
    return found


def table(restores: Counter[str]) -> str:
    """Return the same for people."""
    return "\n".join(
        f"{fault:32} " + ", ".join(f"{number} {ended}" for ended, number in ends.items())
        for fault, ends in rows(restores).items()
    )


if __name__ == "__main__":
    raise SystemExit(main())
