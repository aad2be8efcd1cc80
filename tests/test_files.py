"""Files are there whole or not at all."""

from pathlib import Path

import pytest

from eagleeye.errors import EnvironmentLacks
from eagleeye.files import write_whole


def test_it_replaces_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "file", "first")
    write_whole(tmp_path / "new" / "file", "second")
    assert (tmp_path / "new" / "file").read_text() == "second"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]


def test_what_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(EnvironmentLacks, match="cannot write"):
        write_whole(tmp_path / "file" / "report.html", "new")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(EnvironmentLacks, match="cannot write"):
        write_whole(tmp_path / "report.html", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "report.html"]
