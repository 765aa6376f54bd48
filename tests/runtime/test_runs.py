"""Run folders: made safely, files whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotlights.runtime import runs
from spotlights.runtime.errors import UserError


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("old")

    def write_half() -> None:
        with runs.replacing(target) as temporary:
            temporary.write_text("ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert target.read_text() == "old"


def test_unwritable_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*notes\.txt: No such file or directory"):
        runs.write(tmp_path / "missing" / "notes.txt", "text")


def test_fresh_folders_differ_and_empty_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with runs.new_folder(None, "toy") as first, runs.new_folder(None, "toy") as second:
        assert first != second
        assert first.is_dir()
        (second / "kept").touch()
    assert not first.exists()
    assert second.exists()


def test_settings_without_training_do_not_keep_the_name(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        with runs.new_folder(folder, "toy"):
            runs.write_config(folder, "toy", {})
            raise UserError("the loss became nan")

    with pytest.raises(UserError, match="nan"):
        fail(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"is not empty \(it holds thesis\.tex\)"), runs.new_folder(tmp_path, "toy"):
        pass
    assert (tmp_path / "thesis.tex").exists()


def test_folder_with_a_run_is_refused_with_the_way_on(tmp_path: Path) -> None:
    runs.write_config(tmp_path, "toy", {"lr": 0.1})
    with pytest.raises(UserError, match="already holds a run; go on with it by --resume"):
        runs.new_folder(tmp_path, "toy").__enter__()


def test_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out: cannot make the folder"):
        runs.new_folder(tmp_path / "file" / "run", "toy").__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="permission denied"):
        runs.new_folder(tmp_path, "toy").__enter__()


def test_config_comes_back(tmp_path: Path) -> None:
    values = {"lr": 0.1, "names": ["katzen", "犬"], "data": None}
    runs.write_config(tmp_path, "toy", values)
    assert runs.read_config(tmp_path, "toy") == values


def test_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    runs.write_config(tmp_path, "toy", {})
    with pytest.raises(UserError, match="a run of kind 'toy', expected 'game'"):
        runs.read_config(tmp_path, "game")


@pytest.mark.parametrize("text", ["[1, 2", "just words", "\x00"])
def test_damaged_config_is_a_user_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError):
        runs.read_config(tmp_path, "toy")


def test_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        runs.read_config(tmp_path / "nowhere", "toy")
    with pytest.raises(UserError, match="not a run folder"):
        runs.read_config(tmp_path, "toy")
