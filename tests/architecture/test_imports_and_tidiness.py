"""What may import what, where the clock is asked, and what must not lie in the tree."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("eagleeye", "remediation", "checkpoint")
LINTER = shutil.which("lint-imports", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

needs_linter = pytest.mark.skipif(LINTER is None, reason="import-linter is not installed")


def lint(folder: Path) -> "subprocess.CompletedProcess[str]":
    assert LINTER is not None
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([LINTER, "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@needs_linter
def test_the_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert " 0 broken." in done.stdout


@needs_linter
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("eagleeye/records.py", "import pandas", "light node"),
        ("eagleeye/collect/logs.py", "from eagleeye.window import Window", "layers"),
        ("eagleeye/online/vote.py", "from eagleeye.offline import corpus", "online and offline unaware of each other"),
        ("eagleeye/actions/policy.py", "from remediation.dryrun import DryRun", "no hands: detection never imports remediation"),
        ("eagleeye/online/judge.py", "import stumpy", "one door: stumpy only in matrix_profile"),
        ("checkpoint/place.py", "from eagleeye import clock", "checkpoint alone: it imports nothing else of ours"),
        ("checkpoint/server.py", "import torch", "torch door: only the training process's side imports torch"),
        ("eagleeye/online/vote.py", "from checkpoint import place", "detection never imports checkpoint"),
    ],
)  # fmt: skip
def test_each_kind_of_contract_can_break(tmp_path: Path, module: str, line: str, contract: str) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout
    assert f"{contract} BROKEN" in done.stdout


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def test_only_the_clock_asks_for_the_time() -> None:
    """But for two lines of `checkpoint`, which imports nothing of ours and numbers the starts of a job by the time."""
    found = []
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                if called in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"):
                    found.append(name)
            elif (
                isinstance(node, ast.ImportFrom) and node.module == "time" and {a.name for a in node.names} & {"time", "time_ns"}
            ):
                found.append(name)
    assert found.count("checkpoint/client.py") == found.count("checkpoint/server.py") == 1
    assert set(found) == {"eagleeye/clock.py", "checkpoint/client.py", "checkpoint/server.py"}


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches all exceptions and does not raise them again."""
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"BaseException"}
    again = any(isinstance(node, ast.Raise) and node.exc is None for node in handler.body)
    return bool(names & {"Exception", "BaseException"}) and not again


def test_bugs_are_swallowed_only_at_the_edges_of_loops() -> None:
    found = sorted(
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and swallows_everything(node)
    )
    assert found == ["eagleeye/collect/base.py", "eagleeye/collect/exporter.py", *["eagleeye/online/scorer.py"] * 2]


def test_nothing_is_pickled() -> None:
    for name, tree in modules():
        imported = {
            alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
        }
        assert not imported & {"pickle", "cloudpickle", "joblib", "dill", "marshal", "shelve"}, name


def test_package_files_hold_nothing_but_a_docstring_and_the_version() -> None:
    for name, tree in modules():
        if name.endswith("__init__.py"):
            assert ast.get_docstring(tree), name
            assert len(tree.body) == (2 if name == "eagleeye/__init__.py" else 1), name


def test_every_module_and_every_public_thing_says_what_it_is() -> None:
    silent = []
    for name, tree in modules():
        if not ast.get_docstring(tree):
            silent.append(name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{name}: {node.name}")
    assert silent == []


def test_tests_are_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_datasets_is_data_and_the_scripts_that_make_it() -> None:
    assert list((ROOT / "datasets").rglob("__init__.py")) == []
    assert list((ROOT / "datasets" / "runs").rglob("*.py")) == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def run(code: str, folder: Path, path: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("name", ["datasets"])
def test_a_users_package_is_found_from_the_root_of_this_repository(tmp_path: Path, name: str) -> None:
    """As ``python -c`` puts the working folder first, a folder of ours with that name would win if it held modules."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("whose = 'the user'\n")
    assert run(f"import eagleeye.cli, {name}; print({name}.whose)", ROOT, tmp_path) == "the user"


@pytest.mark.parametrize("name", ["datasets", "checkpoint"])
def test_a_users_module_beside_the_training_script_disturbs_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("whose = 'the user'\n")
    (tmp_path / "train.py").write_text(
        f"import sys, {name}\nimport eagleeye.collect.progress, eagleeye.cli, remediation.dryrun\n"
        f"print({name}.whose, eagleeye.cli.main(['remediate', '--once', '--scorer', 'http://127.0.0.1:1']))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "the user 3\n"
