"""The catalogue keeps Prometheus' rules of naming, and its two names of a thing say the same."""

import re

import pytest

from eagleeye.errors import DataError
from eagleeye.metrics import BY_COLUMN, BY_SERIES, CATALOGUE, LABELS, PREFIX, RANK_INFO, UNITS, Metric, check_unit

SUFFIX = {
    "bytes": ("_bytes",),
    "bytes/s": ("_bytes_per_second",),
    "watts": ("_watts",),
    "celsius": ("_celsius",),
    "hertz": ("_hertz",),
    "seconds": ("_seconds",),
    "1/s": ("_per_second",),
    "steps": ("_count",),
}

every = pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.column)
served = pytest.mark.parametrize("metric", [m for m in CATALOGUE if m.series], ids=lambda metric: metric.column)


def test_names_are_unique() -> None:
    assert len(BY_COLUMN) == len(CATALOGUE)
    series = [m.series for m in CATALOGUE if m.series]
    assert len(BY_SERIES) == len(series)
    assert RANK_INFO.series not in BY_SERIES


@every
def test_column(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.column)
    assert metric.unit in UNITS
    assert metric.scope in LABELS
    assert metric.help.endswith(".")
    if metric.unit in SUFFIX:
        assert metric.column.endswith(SUFFIX[metric.unit])
    else:
        assert not any(metric.column.endswith(s) for suffixes in SUFFIX.values() for s in suffixes)


@served
def test_series(metric: Metric) -> None:
    assert metric.series is not None
    assert re.fullmatch(PREFIX + r"[a-z0-9_]+", metric.series)
    assert metric.series.endswith("_total") == (metric.kind == "counter")
    assert metric.series.endswith("_timestamp_seconds") == (metric.kind == "timestamp")
    if metric.kind == "timestamp":
        assert (metric.unit, metric.column[-12:]) == ("seconds", "_age_seconds")
    if metric.kind == "counter":
        assert metric.unit in ("bytes/s", "1/s", "1"), "a counter becomes a rate"
        if metric.unit == "1":
            assert metric.series.endswith("_seconds_total"), "seconds per second have no unit"
    if metric.kind == "gauge" and metric.unit in ("bytes", "watts", "celsius", "hertz", "seconds"):
        assert metric.series.endswith(f"_{metric.unit}")


@every
def test_the_facts_of_rules_are_not_compared_between_ranks(metric: Metric) -> None:
    fact = metric.kind == "timestamp" or metric.column.startswith("log_") or metric.column.endswith("_up")
    assert not (fact and metric.compared)


def test_labels_tell_node_and_scope() -> None:
    assert all(labels[0] == "node" for labels in LABELS.values())
    assert BY_COLUMN["log_errors"].labels == ("node", "class")
    assert BY_COLUMN["ib_port_up"].labels == ("node", "device", "port")
    assert RANK_INFO.labels == ("node", "training_job", "rank", "local_rank", "world_size", "gpu", "group", "pid")


def test_units_that_data_declare() -> None:
    check_unit("gpu_power_watts", "watts", "trace.json")
    check_unit("tape_speed", "bytes/s", "trace.json")
    with pytest.raises(DataError, match=r"^trace.json: gpu_power_watts has unit 'kW'; use one of 1, bytes, "):
        check_unit("gpu_power_watts", "kW", "trace.json")
    with pytest.raises(DataError, match=r"^trace.json: gpu_power_watts must be in 'watts', not 'celsius'; convert it before"):
        check_unit("gpu_power_watts", "celsius", "trace.json")
    with pytest.raises(DataError, match=r"^trace.json: tape_speed has unit 'MB/s'"):
        check_unit("tape_speed", "MB/s", "trace.json")
