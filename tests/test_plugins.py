"""The table of seams: every name in it loads, strangers come by entry point, and what is missing is said in one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

from eagleeye import plugins
from eagleeye.collect import base
from eagleeye.errors import ConfigError, MissingExtra


@pytest.mark.parametrize(("kind", "name"), plugins.TABLE)
def test_every_built_in_name_loads_and_knows_its_name(kind: str, name: str) -> None:
    assert plugins.load(kind, name).name == name
    assert name in plugins.names(kind)


def test_the_collectors_of_the_settings_are_those_of_the_table() -> None:
    assert {name for kind, name in plugins.TABLE if kind == "collector"} == set(base.BUILT_IN)


@pytest.mark.parametrize("kind", ["collector", "detector", "backend"])
def test_an_unknown_name_lists_the_known_ones(kind: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plugins.load(kind, "ouija")
    assert str(raised.value) == f"no {kind} is called 'ouija'; there are {', '.join(plugins.names(kind))}"


def install(folder: Path, entry: str, source: str = "") -> None:
    """Make `folder` a place in which a distribution with one entry point is installed."""
    info = folder / "east_wing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: east-wing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[eagleeye.backend]\n{entry}\n")
    (folder / "east_wing.py").write_text(source)


def test_a_plug_in_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "east = east_wing:Hands", "class Hands:\n    name = 'east'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.names("backend") == ("dryrun", "local", "east")
    assert plugins.load("backend", "east").name == "east"
    del sys.modules["east_wing"]


def test_a_plug_in_cannot_replace_a_built_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "dryrun = east_wing:Hands", "raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.names("backend") == ("dryrun", "local")
    assert plugins.load("backend", "dryrun").__module__ == "remediation.dryrun"


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "east = east_wing:Hands", "import a_package_that_nobody_has.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match=r"^backend 'east' needs the package 'a_package_that_nobody_has': pip install "):
        plugins.load("backend", "east")


def test_a_bug_of_our_own_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.TABLE, ("backend", "typo"), "remediation.dryrum:DryRun")
    with pytest.raises(ModuleNotFoundError, match=r"remediation\.dryrum"):
        plugins.load("backend", "typo")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = "import sys; from eagleeye import plugins; plugins.names('detector'); print('eagleeye.detectors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
