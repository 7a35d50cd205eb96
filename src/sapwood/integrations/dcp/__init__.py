"""torch.distributed.checkpoint with the crash safety of Sapwood's checkpoints.

    import torch.distributed.checkpoint as dcp
    from sapwood.integrations.dcp import SapwoodReader, SapwoodStager, SapwoodWriter

    dcp.save(state, storage_writer=SapwoodWriter("ckpts"))
    dcp.load(state, storage_reader=SapwoodReader("ckpts"))

    stager = SapwoodStager()
    future = dcp.async_save(state, storage_writer=SapwoodWriter("ckpts"), async_stager=stager)

Every save is a folder of its own that appears when all of it is on the device; every byte is
verified before a load touches the state dict; and nothing on disk is unpickled but plain values, by
torch's restricted unpickler.
"""

from __future__ import annotations

from sapwood.integrations.dcp.reader import SapwoodReader
from sapwood.integrations.dcp.stager import SapwoodStager
from sapwood.integrations.dcp.writer import SapwoodWriter

__all__ = ["SapwoodReader", "SapwoodStager", "SapwoodWriter"]
