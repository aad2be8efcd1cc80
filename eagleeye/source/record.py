"""A live job -> a recorded trace."""

from collections.abc import Callable
from pathlib import Path

from eagleeye.clock import SystemClock
from eagleeye.errors import NoData, SourceUnavailable
from eagleeye.source.base import Source
from eagleeye.source.trace import TraceWriter

_SPOOL_COLUMNS = 60


def record(
    source: Source,
    clock: SystemClock,
    job: str,
    duration_s: float,
    folder: Path,
    tell: Callable[[float, int, int], None] = lambda done_s, ranks, metrics: None,
) -> float:
    """Write what the ranks of `job` do from now on as a trace; return the seconds recorded.

    Ends with what it has until then: after `duration_s`, when `clock` is stopped, or when nobody tells of the job any more.

    Parameters
    ----------
    tell : called after each column with seconds done, ranks and metrics

    Raises
    ------
    NoData
        Nothing is known of the job at the beginning, or it was stopped before the first column.
    UsageError
        The folder exists.
    SourceUnavailable
        The server did not answer at the beginning or at the end; nothing is left behind.
    EnvironmentLacks
        The disk is full; nothing is left behind.
    """
    step_s = source.step_s
    total = max(1, round(duration_s / step_s))
    with TraceWriter(folder) as writer:
        start_s = clock.now_s()
        source.scrape(start_s)
        # Raised now rather than after the whole duration: a misspelt name is the likeliest mistake.
        source.window(job, start_s, step_s)
        done = spooled = 0
        gone = False
        while done < total and not gone:
            at_s = start_s + (done + 1) * step_s
            clock.sleep_s(at_s - clock.now_s())
            if clock.stopped:
                break
            source.scrape(at_s)
            done += 1
            try:
                newest = source.window(job, at_s, step_s)
                if done - spooled >= _SPOOL_COLUMNS:
                    writer.add(source.window(job, at_s, (done - spooled) * step_s))
                    spooled = done
                tell(done * step_s, len(newest.ranks), len(newest.metrics))
            except SourceUnavailable:
                continue  # the server keeps the data; the next spool reaches back to them
            except NoData:
                gone, done = True, done - 1
        if done > spooled:
            writer.add(source.window(job, start_s + done * step_s, (done - spooled) * step_s))
        if writer.empty:
            raise NoData(f"{folder} is not written: stopped before the first {step_s:g} s were over")
    return done * step_s
