"""The documentation names every setting and every verb.

After a change of a `Settings` class: ``EAGLEEYE_REWRITE=1 pytest tests/architecture/test_documentation_complete.py``.
"""

import ast
import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from eagleeye.cli import VERBS
from eagleeye.config import SECTIONS
from eagleeye.metrics import CATALOGUE, RANK_INFO, Metric

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

`eagleeye` reads `./eagleeye.toml` when it exists, or the file that `--config` or `$EAGLEEYE_CONFIG` names. A value of the
environment goes before one of the file, and a flag before both. The variable of a setting is `EAGLEEYE_`, its section, two
underscores, its name: `EAGLEEYE_ONLINE__LEARN_S=90s`. An unknown section or setting is an error, never ignored.

Settings that end in `_s` are durations (`"250ms"`, `"90s"`, `"1h30m"`, `"30d"`, or a number of seconds), those that end in
`_bytes` are sizes (`"64MiB"`, or a number of bytes). Lists are TOML lists; in the environment and on the command line they are
separated by commas.

`EAGLEEYE_NODE` and `NODE_NAME` are no settings but defaults of `[collect] node`, below the file.
"""

Setting = tuple[str, str, str | None]
"""Name, default, docstring."""


def owners() -> list[tuple[str, str, ast.ClassDef]]:
    """Return (section, module, class) of every `Settings` in the packages."""
    found = []
    for package in ("eagleeye", "remediation", "checkpoint"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == "Settings":
                    section = re.search(r"``\[([a-z.]+)\]``", ast.get_docstring(node) or "")
                    assert section, f"{path}: the docstring of Settings must name its section"
                    found.append((section.group(1), ".".join(path.relative_to(ROOT).with_suffix("").parts), node))
    return sorted(found, key=lambda owner: (SECTIONS.index(owner[0].partition(".")[0]), owner[0]))


def shown(name: str, value: Any) -> str:
    """Return a default as one would write it in the file."""
    if name.endswith("_s"):
        size, unit = next(((n, u) for n, u in ((86400, "d"), (3600, "h"), (60, "m")) if value >= n and value % n == 0), (1, "s"))
        return f'"{value / size:g}{unit}"'
    if name.endswith("_bytes"):
        shift, unit = next(
            ((n, u) for n, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if value and value % (1 << n) == 0), (0, "B")
        )
        return f'"{value >> shift}{unit}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    if isinstance(value, str):
        return f"'{value}'" if "\\" in value else f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(module: str, node: ast.ClassDef) -> list[Setting]:
    """Return the fields of a `Settings` class with the docstring under each."""
    kind = importlib.import_module(module).Settings
    found = []
    for field, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = (
                following.value.value if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) else None
            )
            computed = field.value is not None and "default_factory" in ast.unparse(field.value)
            default = "this machine's" if computed else f"`{shown(field.target.id, getattr(kind(), field.target.id))}`"
            found.append((field.target.id, default, text and " ".join(str(text).split())))
    return found


def cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def page() -> str:
    parts = [HEAD]
    for section, module, node in owners():
        about = (ast.get_docstring(node) or "").splitlines()[0]
        about = re.sub(r"^(The s|S)ection ``\[[a-z.]+\]``[:.]? ?", "", about)
        parts.append(f"\n## [{section}]\n" + (f"\n{about[0].upper()}{about[1:]}\n" if about else ""))
        parts.append("\n| setting | default | meaning |\n| --- | --- | --- |\n")
        parts += [f"| `{name}` | {cell(default)} | {cell(str(text))} |\n" for name, default, text in settings(module, node)]
    return "".join(parts)


@pytest.mark.parametrize(("section", "module", "node"), owners(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_setting_says_what_it_is(section: str, module: str, node: ast.ClassDef) -> None:
    silent = [name for name, _, text in settings(module, node) if not text or not text.endswith((".", ")."))]
    assert silent == []


def test_every_setting_is_on_the_page_of_settings() -> None:
    if os.environ.get("EAGLEEYE_REWRITE") == "1":
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "run again with EAGLEEYE_REWRITE=1"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_readme(verb: str) -> None:
    assert f"eagleeye {verb}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("metric", [*CATALOGUE, RANK_INFO], ids=lambda metric: metric.column)
def test_every_series_is_in_the_docs(metric: Metric) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"`{metric.series or metric.column}`" in page
    assert metric.help in page
