"""The wheel: three top-level packages, what they need at run time, and nothing of the rest of the repository."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree so that no build folder is left in it."""
    for needed in ("setuptools", "build"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    tree = tmp_path_factory.mktemp("tree") / "copy"
    unwanted = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist", "eagleeye-data", "run")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    (tree / "datasets").mkdir(exist_ok=True)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_top_level_names(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"eagleeye", "remediation", "checkpoint"}
    assert wheel.name.startswith("eagleeye_toolkit-")


@pytest.mark.slow
def test_every_file_that_is_not_code_comes_along(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("eagleeye", "remediation", "checkpoint"):
        ours = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert ours <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_command_is_installed(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "eagleeye = eagleeye.cli:main" in archive.read(entry_points).decode()
