"""Makes files and folders of other programs, valid and malformed."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

import dynaquant as dq
from dynaquant.interop import any_format
from dynaquant.interop.whole_state import DCP_METADATA

INDEX = "model.safetensors.index.json"


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Code:
    """An object whose pickle runs a command that creates a file."""

    def __init__(self, made) -> None:
        self.made = made

    def __reduce__(self):
        return os.system, (f"touch {self.made}",)


def hf_folder(folder):
    """Write a folder with two shards and an index. Returns the index."""
    folder.mkdir()
    save_file({"a": torch.randn(8, 8), "b": torch.randn(8)}, folder / SHARDS[0], metadata={"format": "pt"})
    save_file({"c": torch.randn(8, 4)}, folder / SHARDS[1], metadata={"format": "pt"})
    index = {"metadata": {"total_size": 416}, "weight_map": {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def refuses(path, *reasons: str) -> None:
    """Check that reading raises one short sentence that names the path and the reasons."""
    with pytest.raises((dq.CheckpointError, dq.StateError)) as caught:
        any_format.read(path)
    said = str(caught.value)
    assert str(path) in said
    assert "\n" not in said
    assert len(said) < 600
    for reason in reasons:
        assert reason in said


def with_metadata(folder, change):
    """Copy a DCP folder with changed metadata. Returns the copy."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    metadata = pickle.loads((copy / DCP_METADATA).read_bytes())
    changed = change(metadata)
    (copy / DCP_METADATA).write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(changed or metadata))
    return copy
