"""What exporters said, kept as Parquet files in a folder, so that `train` needs no server.

One file holds some minutes: `at_s` (seconds since the epoch), `series` (name and labels as JSON) and `value` (raw). A file
appears whole or not at all.
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagleeye.errors import EnvironmentLacks
from eagleeye.files import sync_folder
from eagleeye.source.series import SLACK_S, Block, Floats, block_up

_LOG = logging.getLogger(__name__)


class History:
    """The files of one folder. One process writes; any number may read at the same time."""

    def __init__(self, folder: Path, keep_s: float) -> None:
        self._folder = folder
        self._keep_s = keep_s
        self._known_bad: set[Path] = set()

    def write(self, blocks: Sequence[Block]) -> None:
        """Write the samples as one file, and delete files that are older than `keep_s`.

        Raises
        ------
        EnvironmentLacks
            The folder cannot be written, or the disk is full; nothing is left behind.
        """
        names: list[str] = []
        at, which, values = [], [], []
        for block in blocks:
            s, n = np.nonzero(np.isfinite(block.values_SN))
            at.append(block.at_N[n])
            which.append((s + len(names)).astype(np.int32))
            values.append(block.values_SN[s, n])
            names += [
                json.dumps({"__name__": name, **labels}, sort_keys=True)
                for name, labels in zip(block.names, block.labels, strict=True)
            ]
        if not sum(part.size for part in at):
            return
        at_s = np.concatenate(at)
        first_ms, last_ms = int(at_s.min() * 1000), int(np.ceil(at_s.max() * 1000))
        series = pa.DictionaryArray.from_arrays(pa.array(np.concatenate(which)), pa.array(names))
        table = pa.table({"at_s": at_s, "series": series, "value": np.concatenate(values)})
        path = self._folder / f"{first_ms:014d}-{last_ms:014d}.parquet"
        part = path.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            sync_folder(self._folder)
            for old in self._folder.glob("*.parquet"):
                span = _span_s(old)
                if span and span[1] < last_ms / 1000 - self._keep_s:
                    old.unlink(missing_ok=True)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise EnvironmentLacks(f"cannot write the history {path}: {error.strerror or error}") from None

    def read(self, start_s: float, end_s: float) -> list[Block]:
        """Return the samples in [start_s, end_s]. A file that is broken is skipped, with one warning."""
        found: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
        for path in sorted(self._folder.glob("*.parquet")):
            span = _span_s(path)
            if span is None or span[0] > end_s + SLACK_S or span[1] < start_s or path in self._known_bad:
                continue
            try:
                table = pq.read_table(path, columns=["at_s", "series", "value"])
                series = table.column("series").combine_chunks().dictionary_encode()
                names = series.dictionary.to_pylist()
                which = series.indices.to_numpy()
                at_s, value = table.column("at_s").to_numpy(), table.column("value").to_numpy()
            except FileNotFoundError:
                continue  # deleted for its age by the writer, just now
            except (OSError, pa.ArrowException, ValueError, KeyError) as error:
                self._known_bad.add(path)
                _LOG.warning("%s is skipped, it is broken: %s", path, str(error).splitlines()[0])
                continue
            order = np.argsort(which, kind="stable")
            for run in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
                inside = run[(at_s[run] >= start_s) & (at_s[run] <= end_s + SLACK_S)]
                if inside.size:
                    found[names[which[inside[0]]]].append((at_s[inside], value[inside]))
        return block_up([_merged(name, parts) for name, parts in found.items()])


def _merged(name: str, parts: list[tuple[Floats, Floats]]) -> tuple[str, Mapping[str, str], Floats, Floats]:
    labels = json.loads(name)
    at_s, first = np.unique(np.concatenate([p[0] for p in parts]), return_index=True)
    return labels.pop("__name__"), labels, at_s, np.concatenate([p[1] for p in parts])[first]


def _span_s(path: Path) -> tuple[float, float] | None:
    first, _, last = path.stem.partition("-")
    return (int(first) / 1000, int(last) / 1000) if first.isdecimal() and last.isdecimal() else None
