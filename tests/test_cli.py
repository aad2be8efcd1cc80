"""The command line: its verbs are frozen in a file, and whatever goes wrong is one sentence with the right exit code.

After a change of verbs or options: ``EAGLEEYE_REWRITE=1 pytest tests/test_cli.py`` and read the difference.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagleeye import __version__
from eagleeye.cli import VERBS, main

GOLDEN = Path(__file__).parent / "golden" / "verbs.txt"
REWRITE = os.environ.get("EAGLEEYE_REWRITE") == "1"


def described() -> str:
    lines = []
    for name, (summary, add_options, _) in VERBS.items():
        lines.append(f"{name}: {summary}")
        parser = argparse.ArgumentParser(add_help=False)
        add_options(parser)
        for action in parser._actions:
            names = ", ".join(action.option_strings) or "(argument)"
            value = (
                ""
                if action.nargs == 0
                else f" {action.metavar or (action.option_strings and action.dest.upper()) or action.dest}"
            )
            marks = [
                *(["required"] if action.required else []),
                *([f"nargs {action.nargs}"] if isinstance(action.nargs, str) else []),
                *([f"one of {', '.join(map(str, action.choices))}"] if action.choices else []),
                *(["repeatable"] if type(action).__name__ == "_AppendAction" else []),
                *([f"default {action.default}"] if action.default not in (None, False, []) else []),
            ]
            lines.append(f"    {names}{value}" + (f"  [{'; '.join(marks)}]" if marks else ""))
    return "\n".join(lines) + "\n"


def test_verbs_and_options_are_those_of_the_file() -> None:
    if REWRITE:
        GOLDEN.write_text(described(), encoding="utf-8")
    assert described() == GOLDEN.read_text(encoding="utf-8"), "run again with EAGLEEYE_REWRITE=1 if this is meant"


def test_every_option_explains_itself() -> None:
    for name, (summary, add_options, _) in VERBS.items():
        assert re.fullmatch(r"[A-Z].*\.", summary), name
        parser = argparse.ArgumentParser(add_help=False)
        add_options(parser)
        for action in parser._actions:
            assert action.help, f"{name} {action.option_strings}"
        parser.format_help()


def eagleeye(*arguments: str, blocked: tuple[str, ...] = (), folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own in which the packages `blocked` cannot be imported."""
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from eagleeye.cli import main
sys.exit(main(sys.argv[1:]))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EAGLEEYE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=60,
        check=False,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"eagleeye {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["dance"], ["export", "--nonsense"], ["export", "--port", "x"], ["record"]])
def test_what_cannot_be_parsed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, errors = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert errors.startswith("usage: eagleeye ")


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"eagleeye {verb}" in capsys.readouterr().out


NEEDS_DETECT = {
    "record": ("--job", "llm", "--duration", "1s", "--out", "x", "--targets", "127.0.0.1:1"),
    "score": ("--targets", "127.0.0.1:1"),
    "train": ("--traces", "x"),
    "evaluate": ("x", "--verdicts", "y"),
    "report": ("x", "--verdicts", "y"),
}


@pytest.mark.parametrize("verb", NEEDS_DETECT)
def test_a_missing_extra_is_one_sentence(verb: str, tmp_path: Path) -> None:
    if verb not in VERBS:
        pytest.skip(f"there is no verb {verb} yet")
    done = eagleeye(verb, *NEEDS_DETECT[verb], blocked=("numpy",), folder=tmp_path)
    sentence = rf"eagleeye {verb}: .*needs the package 'numpy': pip install 'eagleeye-toolkit\[detect\]'\n"
    assert re.fullmatch(sentence, done.stderr), done.stderr
    assert (done.returncode, done.stdout) == (3, "")
    assert list(tmp_path.iterdir()) == []


def test_a_package_within_a_package(tmp_path: Path) -> None:
    done = eagleeye("score", "--targets", "127.0.0.1:1", "--model", "none", "--port", "0", blocked=("numba",), folder=tmp_path)
    assert done.returncode == 3, done.stderr
    assert re.search(r"needs the package 'numba': pip install 'eagleeye-toolkit\[detect\]'\n$", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_bug_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: argparse.Namespace) -> int:
        import eagleeye.nothing_there  # type: ignore[import-not-found]

        return int(eagleeye.nothing_there.x)

    monkeypatch.setitem(VERBS, "export", (*VERBS["export"][:2], broken))
    with pytest.raises(ModuleNotFoundError, match=r"eagleeye\.nothing_there"):
        main(["export"])


def test_an_interrupt_ends_without_a_word(tmp_path: Path) -> None:
    """The configuration is a pipe, so the command waits for it when the signal comes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-c", "from eagleeye.cli import main; raise SystemExit(main())", "--config", str(pipe), "export"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with pipe.open("w"):  # opens once the command reads
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (130, b"", b"")


WRONG = [
    (("export",), "[collect]\nprot = 1\n", "export: [collect] prot: unknown setting 'prot'; did you mean 'port'?"),
    (("export",), "[remediation.luncher]\n", "export: unknown section [remediation.luncher]; there are launcher, dryrun, local"),
    (("export",), "[colect]\n", "export: eagleeye.toml: unknown section [colect]; did you mean 'collect'?"),
    (("export", "--port", "99999"), "", "export: [collect] port 99999 does not exist; use 0 to 65535"),
    (("record", "--job", "j", "--duration", "soon", "--out", "x"), "", "record: 'soon' is no duration; write for example 90s, "),
    (("record", "--job", "j", "--duration", "1s", "--out", "x"), "", "record: [source] names nothing to read: set targets"),
    (("score", "--replay", "x"), "", "score: --replay needs --out-dir, the folder for the verdicts"),
    (("score", "--targets", "h:1", "--learn", "-1s"), "", "score: "),
    (("score",), "[online]\npolicy = 'most'\n", "score: [online] no policy is called 'most'; there are default, transom"),
    (("remediate", "--interval", "often"), "", "remediate: 'often' is no duration"),
    (("remediate",), "[actions]\nmax_nodes = 'two'\n", "remediate: [actions] max_nodes: 'two' is not a int"),
]


@pytest.mark.parametrize(
    ("arguments", "file", "sentence"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_wrong_word_is_one_sentence(
    arguments: tuple[str, ...],
    file: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("EAGLEEYE_")]:
        monkeypatch.delenv(name)
    if file:
        Path("eagleeye.toml").write_text(file)
    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, errors = capsys.readouterr()
    assert (status, out) == (2, "")
    assert sentence in errors
    if "-1s" not in arguments:
        assert errors.startswith(f"eagleeye {sentence}")
        assert errors.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == ({"eagleeye.toml"} if file else set())
