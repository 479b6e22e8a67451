"""Settings that all tests share."""

import importlib.util
import os
import signal
import sys

# Two workers and their subprocesses share the cores; threads of each would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# `make sanitize` runs the native tests with another build of the native module.
if path := os.environ.get("DYNAQUANT_NATIVE"):
    spec = importlib.util.spec_from_file_location("dynaquant._native", path)
    sys.modules["dynaquant._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["dynaquant._native"])

import torch
import torch.distributed as dist

# A shell starts a background job with SIGINT ignored, and what this process starts would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("thorough", deadline=None, derandomize=True)  # machines are shared and noisy
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=10)

pytest_plugins = ["tiers"]


def pytest_addoption(parser):
    parser.addoption("--emulated", action="store_true", help="also use an emulated device, in this whole process")


def pytest_configure(config):
    if config.getoption("--emulated"):
        importlib.import_module("emulated")


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """A group of one process, which is enough for DistributedDataParallel and to shard."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
