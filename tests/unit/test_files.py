"""Files are written whole or not at all, whatever the disk does."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from edgegossip.contract import snapshot
from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.snapshot import assemble
from edgegossip.runs import files
from edgegossip.runs.files import load_checkpoint, save_checkpoint, write_atomically, write_json
from edgegossip.sim.link import Link


def disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / "file.part").write_bytes(b"what a killed process left, longer than all else")
    write_atomically(path, b"old and long")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("what", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    owner: Any = os if what == "fsync" else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, what, disk_full)
        with pytest.raises(RunFolderError, match=r"cannot write .*/file: No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("place", ["no/such/folder/file", "a-file/file", "a-folder"])
def test_a_place_that_cannot_be_written_is_an_error_for_people(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "a-file").write_bytes(b"x")
    (tmp_path / "a-folder").mkdir()
    with pytest.raises(RunFolderError, match=r"cannot write .*; free some space or choose"):
        write_atomically(tmp_path / place, b"new")
    assert sorted(os.listdir(tmp_path)) == ["a-file", "a-folder"]


def test_json_is_for_every_reader(tmp_path: Path) -> None:
    content = {"loss": math.nan, "more": [1, (2.5, -math.inf)], "text": "ü"}
    write_json(tmp_path / "x.json", content)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads((tmp_path / "x.json").read_text(), parse_constant=refuse)
    assert read == {"loss": None, "more": [1, [2.5, None]], "text": "ü"}


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, {"x": torch.arange(3.0), "deep": [(1, math.inf)], 5: None})
    back = load_checkpoint(path)
    assert back["x"].tolist() == [0.0, 1.0, 2.0]
    assert back["deep"] == [(1, math.inf)]
    assert list(back) == ["x", "deep", 5]


def test_a_checkpoint_without_tensors_comes_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", [1, 2])
    assert load_checkpoint(tmp_path / "checkpoint") == [1, 2]


@pytest.mark.slow
def test_much_that_is_no_tensor_comes_back(tmp_path: Path) -> None:
    """Safetensors would refuse a header of 100 MB."""
    text = "a" * 100_500_000
    save_checkpoint(tmp_path / "checkpoint", {"x": text, "y": torch.ones(1)})
    assert load_checkpoint(tmp_path / "checkpoint")["x"] == text


def test_what_cannot_be_kept_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, [1])
    with pytest.raises(TypeError, match="cannot keep a set"):
        save_checkpoint(path, [{1}])
    assert load_checkpoint(path) == [1]


@pytest.mark.parametrize(
    "plain",
    [
        "[" * 100_000,
        '{"dict": 5}',
        '{"dict": [[[], 1]]}',
        '{"tuple": 7}',
        '{"tensor": "none"}',
        '{"same": 9}',
        '{"dataclass": 5, "number": 0, "fields": {}}',
        '{"dataclass": "edgegossip.contract.protocol:Steps", "number": 0, "fields": [1]}',
        '{"dataclass": "os:environ", "number": 0, "fields": {}}',
    ],
)
def test_a_checkpoint_with_a_right_digest_and_a_wrong_content_is_refused(
    tmp_path: Path, plain: str
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    tensors = {"plain": torch.frombuffer(bytearray(plain.encode()), dtype=torch.uint8)}
    content = safetensors.torch.save(tensors, metadata={"digest": files._digest(tensors)})
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"checkpoint\.safetensors is not a checkpoint of"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_version_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    with monkeypatch.context() as patch:
        patch.setattr(files, "version", lambda name: "0.0.9")
        save_checkpoint(path, {"link": Link(latency=0.1, bandwidth=1.0)})
    assert load_checkpoint(path)["link"].latency == 0.1  # it means the same here
    monkeypatch.setattr(snapshot, "_field_names", lambda kind: ("latency",))
    with pytest.raises(
        RunFolderError, match=r"is of edgegossip 0\.0\.9, .*resume with 0\.0\.9"
    ):
        load_checkpoint(path)


def test_a_dict_whose_keys_take_for_ever_to_hash_is_refused(tmp_path: Path) -> None:
    name = "edgegossip.sim.link:Link"
    nested: object = {"dataclass": name, "number": 0, "fields": {"latency": 0, "bandwidth": 0}}
    for number in range(1, 60):
        fields = {"latency": nested, "bandwidth": {"same": number - 1}}
        nested = {"dataclass": name, "number": number, "fields": fields}
    with pytest.raises(ValueError, match="is not a key of a dict"):
        assemble({"dict": [[nested, 0]]}, {})


def test_a_damaged_checkpoint_is_an_error_for_people(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, {"x": torch.arange(3.0)})
    whole = path.read_bytes()
    for size in (0, 5, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RunFolderError, match="is not a checkpoint of this program"):
            load_checkpoint(path)


@pytest.mark.parametrize("place", ["text", "tensor"])
def test_a_changed_byte_in_a_checkpoint_is_noticed(tmp_path: Path, place: str) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, {"x": torch.arange(3.0)})
    whole = bytearray(path.read_bytes())
    whole[-1 if place == "tensor" else whole.index(b"dict")] ^= 1
    path.write_bytes(whole)
    with pytest.raises(RunFolderError, match="has changed since it was written"):
        load_checkpoint(path)


def test_a_file_of_another_kind_is_no_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "params")
    with pytest.raises(RunFolderError, match="is not a checkpoint"):
        load_checkpoint(tmp_path / "params")
    with pytest.raises(RunFolderError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(RunFolderError, match="is missing; --resume needs"):
        load_checkpoint(tmp_path / "none")
