"""Settings: file < environment < flag, one sentence for whatever is wrong, and every section of the code can be filled."""

import dataclasses
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagleeye import config
from eagleeye.config import duration_s, read, settings, size_bytes
from eagleeye.errors import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("EAGLEEYE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True, slots=True)
class Example:
    """One field of every kind that settings have."""

    learn_s: float = 600.0
    cache_bytes: int = 1024
    quorum: int = 2
    ratio: float = 0.5
    act: bool = False
    name: str = "x"
    logs: tuple[str, ...] = ()
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.quorum > 9:
            raise ValueError("quorum must not be above 9")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("15m", 900), ("2h", 7200), ("30d", 2_592_000), ("1w", 604_800), ("250ms", 0.25), ("1h30m", 5400),
        ("1.5h", 5400), ("90", 90), ("0.5", 0.5), (90, 90), (0.5, 0.5), (" 5s ", 5), ("1m30s", 90), ("1s500ms", 1.5),
    ],
)  # fmt: skip
def test_durations(text: Any, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "5 s", "s", "-5s", "5x", "1h 30m", "ten", "1e3s", "5S", True, None, [], "5s!", "nan", "inf", "0x5"]
)
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ConfigError, match="is no duration; write for example 90s"):
        duration_s(text)


@pytest.mark.parametrize("text", ["0", "0s", 0, -1, float("nan"), float("inf"), "20000000000", "99999999w"])
def test_durations_out_of_bounds(text: Any) -> None:
    with pytest.raises(ConfigError, match="is no duration above zero"):
        duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("2GiB", 2 << 30), ("1.5KiB", 1536), ("1TiB", 1 << 40), ("17B", 17), ("17", 17), (17, 17), (0, 0),
     (" 1 KiB ", 1024)],
)  # fmt: skip
def test_sizes(text: Any, size: int) -> None:
    made = size_bytes(text)
    assert (made, type(made)) == (size, int)


@pytest.mark.parametrize("text", ["", "64MB", "64mib", "MiB", "-1", -1, "1e3", True, None, "64 M"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="is no size; write for example 64MiB"):
        size_bytes(text)


def test_a_file_is_read_when_it_exists(tmp_path: Path) -> None:
    assert read() == {}
    Path("eagleeye.toml").write_text("[online]\nlearn_s = '90s'\n")
    assert read() == {"online": {"learn_s": "90s"}}


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("eagleeye.toml").write_text("[online]\nport = 1\n")
    (tmp_path / "b.toml").write_text("[online]\nport = 2\n")
    (tmp_path / "c.toml").write_text("[online]\nport = 3\n")
    monkeypatch.setenv("EAGLEEYE_CONFIG", str(tmp_path / "b.toml"))
    assert read()["online"]["port"] == 2
    assert read(tmp_path / "c.toml")["online"]["port"] == 3


def test_a_file_that_was_named_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"cannot read the configuration {tmp_path / 'no.toml'}")):
        read(tmp_path / "no.toml")
    monkeypatch.setenv("EAGLEEYE_CONFIG", "gone.toml")
    with pytest.raises(ConfigError, match=r"cannot read the configuration gone\.toml"):
        read()


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read(tmp_path)
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe[online]")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read(path)
    path.write_text("[online\nport = 1\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path} is no valid TOML: ") + ".*line 1"):
        read(path)
    path.write_text("[onlin]\nport = 1\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: unknown section [onlin]; did you mean 'online'?")):
        read(path)


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"online": {"learn_s": "1m", "quorum": 1, "name": "file"}}
    monkeypatch.setenv("EAGLEEYE_ONLINE__LEARN_S", "2m")
    monkeypatch.setenv("EAGLEEYE_ONLINE__QUORUM", "3")
    made = settings(Example, "online", data, {"learn_s": "3m", "name": None})
    assert (made.learn_s, made.quorum, made.name, made.cache_bytes) == (180.0, 3, "file", 1024)


def test_an_empty_flag_is_a_flag() -> None:
    data = {"source": {"logs": ["a.log"], "name": "file", "act": True}}
    made = settings(Example, "source", data, {"logs": "", "name": "", "act": False})
    assert (made.logs, made.name, made.act) == ((), "", False)


def test_another_sections_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEEYE_ACTIONS__LEARN_S", "2m")
    monkeypatch.setenv("EAGLEEYE_JOB", "llm")
    assert settings(Example, "online", {}) == Example()


def test_sections_within_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEEYE_REMEDIATION__KUBERNETES__QUORUM", "4")
    data = {"remediation": {"kubernetes": {"name": "east"}}}
    made = settings(Example, "remediation.kubernetes", data)
    assert (made.name, made.quorum) == ("east", 4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"act": True}, {"act": True}),
        ({"act": "yes"}, {"act": True}),
        ({"act": "OFF"}, {"act": False}),
        ({"ratio": 1}, {"ratio": 1.0}),
        ({"ratio": "0.25"}, {"ratio": 0.25}),
        ({"quorum": "3"}, {"quorum": 3}),
        ({"logs": "a.log, b.log,"}, {"logs": ("a.log", "b.log")}),
        ({"logs": ["a.log", "b,c.log"]}, {"logs": ("a.log", "b,c.log")}),
        ({"logs": ""}, {"logs": ()}),
        ({"limit": 5}, {"limit": 5}),
        ({"cache_bytes": "1MiB"}, {"cache_bytes": 1 << 20}),
        ({"learn_s": 90}, {"learn_s": 90.0}),
    ],
)
def test_values_of_every_kind(given: dict[str, Any], expected: dict[str, Any]) -> None:
    made = settings(Example, "online", {"online": given})
    assert made == dataclasses.replace(Example(), **expected)
    for name, value in expected.items():
        assert type(getattr(made, name)) is type(value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"learn": "90s"}, "[online] learn: unknown setting 'learn'; did you mean 'learn_s'?"),
        ({"learn_s": "soon"}, "[online] learn_s: 'soon' is no duration; write for example 90s, 15m, 1h30m or 30d"),
        ({"cache_bytes": "1MB"}, "[online] cache_bytes: '1MB' is no size; write for example 64MiB or 2GiB"),
        ({"quorum": 2.5}, "[online] quorum: 2.5 is not a int"),
        ({"quorum": "many"}, "[online] quorum: 'many' is not a int"),
        ({"quorum": True}, "[online] quorum: True is not a int"),
        ({"quorum": 10}, "[online] quorum must not be above 9"),
        ({"ratio": True}, "[online] ratio: True is not a float"),
        ({"act": "perhaps"}, "[online] act: 'perhaps' is not a bool"),
        ({"act": 1}, "[online] act: 1 is not a bool"),
        ({"name": 5}, "[online] name: 5 is not a str"),
        ({"logs": [1]}, "[online] logs: [1] is not a list of texts"),
        ({"logs": 7}, "[online] logs: 7 is not a list of texts"),
        ({"name": {"a": 1}}, "[online] name: {'a': 1} is not a str"),
    ],
)
def test_values_of_the_wrong_kind(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings(Example, "online", {"online": given})
    assert str(raised.value) == sentence


def test_the_sentence_names_where_the_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--learn-s: 'x' is no duration"):
        settings(Example, "online", {}, {"learn_s": "x"})
    monkeypatch.setenv("EAGLEEYE_ONLINE__QUORAM", "2")
    with pytest.raises(ConfigError, match=r"^EAGLEEYE_ONLINE__QUORAM: unknown setting 'quoram'; did you mean 'quorum'"):
        settings(Example, "online", {})


@pytest.mark.parametrize("table", [3, [{"learn_s": 1}], "x"])
def test_a_section_that_is_no_table(table: Any) -> None:
    with pytest.raises(ConfigError, match=r"^\[online\] must be a table of settings$"):
        settings(Example, "online", {"online": table})


def owners() -> Iterator[tuple[str, str]]:
    """Yield (module, section) of every `Settings` in the packages, found in the sources."""
    for package in ("eagleeye", "remediation"):
        for path in sorted((ROOT / package).rglob("*.py")):
            match = re.search(r'^class Settings\b.*\n    """.*``\[([a-z.]+)\]``', path.read_text(), re.MULTILINE)
            if match:
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts), match.group(1)
            else:
                assert "class Settings" not in path.read_text(), f"{path}: the docstring of Settings must name its section"


OWNERS = dict(owners())


def test_every_section_has_an_owner_that_the_file_knows() -> None:
    assert {"eagleeye.collect.base", "eagleeye.source.base", "eagleeye.online.judge", "eagleeye.actions.policy"} <= set(OWNERS)
    assert len(set(OWNERS.values())) == len(OWNERS)
    assert {section.split(".")[0] for section in OWNERS.values()} <= set(config.SECTIONS)


def other(name: str, default: Any) -> tuple[Any, str, Any]:
    """Return a value that is not the default: for the file, for the environment, and as it should arrive."""
    if name.endswith("_s"):
        return "77s", "77s", 77.0
    if name.endswith("_bytes"):
        return "3MiB", "3MiB", 3 << 20
    if isinstance(default, bool):
        return not default, str(not default), not default
    if isinstance(default, int):
        return default + 1, str(default + 1), default + 1
    if isinstance(default, float):
        return default / 2, str(default / 2), default / 2
    if name == "members":
        return ["lof", "knn_dtw"], "lof, knn_dtw", ("lof", "knn_dtw")
    if isinstance(default, tuple):
        return ["a", "b"], "a, b", ("a", "b")
    return "(other)", "(other)", "(other)"


@pytest.mark.parametrize("module", OWNERS)
def test_every_setting_can_be_set(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = importlib.import_module(module).Settings
    section = OWNERS[module]
    assert settings(kind, section, {}) == kind()
    assert kind.__dataclass_params__.frozen
    for field in dataclasses.fields(kind):
        in_file, in_environment, expected = other(field.name, getattr(kind(), field.name))
        data: Any = {field.name: in_file}
        for part in reversed(section.split(".")):
            data = {part: data}
        assert _set(kind, section, data, field.name) == expected
        variable = f"EAGLEEYE_{section.upper().replace('.', '__')}__{field.name.upper()}"
        with monkeypatch.context() as patch:
            patch.setenv(variable, in_environment)
            assert _set(kind, section, {}, field.name) == expected


def _set(kind: Any, section: str, data: Any, name: str) -> Any:
    """Fill one field; a value that conflicts with the defaults of others is tried without the check between fields."""
    try:
        return getattr(settings(kind, section, data), name)
    except ConfigError as error:
        sentence = str(error)
    if not (sentence.startswith(f"[{section}] ") and name in sentence):
        pytest.fail(sentence)
    unchecked = dataclasses.make_dataclass("Unchecked", [(f.name, f.type, f) for f in dataclasses.fields(kind)], frozen=True)
    return getattr(settings(unchecked, section, data), name)
