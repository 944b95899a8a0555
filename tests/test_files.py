"""Programs write files completely or not at all, and never through a link."""

import os

import pytest

from nanorlhf.errors import InputError
from nanorlhf.files import atomic, atomic_files, delete, write_text


def test_an_error_while_a_file_is_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "old")]


def test_files_of_a_directory_are_replaced_together_or_not_at_all(tmp_path):
    directory = tmp_path / "new"
    with pytest.raises(ZeroDivisionError), atomic_files(directory, last="b") as partial:
        (partial / "a").write_text("half")
        raise ZeroDivisionError
    assert not directory.exists()
    for content in ("1", "2"):
        with atomic_files(directory, last="a") as partial:
            (partial / "a").write_text(content)
            (partial / "b").write_text(content)
        (directory / "mine").write_text("mine")
    assert {file.name: file.read_text() for file in directory.iterdir()} == {"a": "2", "b": "2", "mine": "mine"}


@pytest.mark.parametrize("name", ["file", "file.tmp"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_replaced_and_not_followed(tmp_path, name, link):
    (tmp_path / "mine").write_text("mine")
    link(tmp_path / "mine", tmp_path / name)
    write_text(tmp_path / "file", "new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"mine": "mine", "file": "new"}
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_replaced(tmp_path, make):
    make(tmp_path / "odd")
    with pytest.raises(InputError, match="odd is not a regular file"):
        write_text(tmp_path / "odd", "new")
    with pytest.raises(InputError, match="/dev/null is not a regular file"):
        write_text(tmp_path.joinpath("/dev/null"), "new")
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


def test_delete_removes_a_link_but_not_its_target(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    for name in ("link", "nowhere", "gone", "absent"):
        delete(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "kept"]
