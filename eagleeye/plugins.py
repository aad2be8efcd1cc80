"""The seams: one literal table from (kind, name) to the object that implements it.

Built-in names are looked up here; other names in the entry-point group ``eagleeye.<kind>`` of installed distributions, so that a
plug-in needs no change of ours. Strings, not classes: nothing is imported before it is asked for.
"""

import importlib
from importlib.metadata import entry_points
from typing import Any

from eagleeye.errors import ConfigError, MissingExtra

TABLE: dict[tuple[str, str], str] = {
    ("collector", "nvml"): "eagleeye.collect.nvml:NvmlCollector",
    ("collector", "infiniband"): "eagleeye.collect.infiniband:InfinibandCollector",
    ("collector", "network"): "eagleeye.collect.network:NetworkCollector",
    ("collector", "process"): "eagleeye.collect.process:ProcessCollector",
    ("collector", "progress"): "eagleeye.collect.progress_reader:ProgressCollector",
    ("collector", "identity"): "eagleeye.collect.identity:IdentityCollector",
    ("collector", "logs"): "eagleeye.collect.logs:LogCollector",
    ("detector", "knn_dtw"): "eagleeye.detectors.knn_dtw:KnnDtw",
    ("detector", "matrix_profile"): "eagleeye.detectors.matrix_profile:KnnMatrixProfile",
    ("detector", "lof"): "eagleeye.detectors.lof:Lof",
    ("detector", "peer_deviation"): "eagleeye.detectors.peer_deviation:PeerDeviation",
    ("backend", "dryrun"): "remediation.dryrun:DryRun",
    ("backend", "local"): "remediation.local:Local",
}


def names(kind: str) -> tuple[str, ...]:
    """Return the names known for `kind`, built-in ones first."""
    built_in = [name for k, name in TABLE if k == kind]
    return (*built_in, *sorted({e.name for e in entry_points(group=f"eagleeye.{kind}")} - set(built_in)))


def load(kind: str, name: str) -> Any:
    """Return the object registered as `name` of `kind`.

    Raises
    ------
    ConfigError
        Nobody registered that name; the sentence lists the known ones.
    MissingExtra
        It is registered, but a package that it needs is not installed.
    """
    target = TABLE.get((kind, name))
    if target is None:
        found = [e for e in entry_points(group=f"eagleeye.{kind}") if e.name == name]
        if not found:
            raise ConfigError(f"no {kind} is called {name!r}; there are {', '.join(names(kind))}")
        target = found[0].value
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("eagleeye", "remediation"):
            raise
        raise MissingExtra(f"{kind} {name!r} needs the package {error.name!r}: pip install 'eagleeye-toolkit[detect]'") from None
