"""Lets ``torch.distributed.checkpoint`` (DCP) save to runs and load from them.

    writer = StorageWriter("runs/gpt")
    dcp.save({"model": …, "optimizer": …}, checkpoint_id="step-1000", storage_writer=writer)
    dcp.load({"model": …, "optimizer": …}, storage_reader=StorageReader("runs/gpt"))

Import this module only where it is used: DCP takes seconds to import.
"""

from dynaquant.interop.dcp_reader import StorageReader
from dynaquant.interop.dcp_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
