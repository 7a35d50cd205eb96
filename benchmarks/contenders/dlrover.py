"""DLRover's Flash Checkpoint: rank 0 copies the state to shared memory, a process writes it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from core.processes import GROUP_MARK

from .saver import WAIT, Saver, copy_optimizer

PAUSE = 0.002
"""Its own wait looks every three seconds, which would say nothing about it."""


class Dlrover(Saver):
    """Without its launcher, as its documentation allows: rank 0 starts the process that writes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # It names sockets and shared memory after the job; without a name, all jobs share them.
        self.job = f"bench-{os.environ[GROUP_MARK]}"
        os.environ.update(TORCHELASTIC_RUN_ID=self.job, GROUP_RANK="0", GROUP_WORLD_SIZE="1")
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self.home = self.context.scratch / "dlrover-tracker"
        self.home.mkdir(exist_ok=True)
        self.checkpointer = DdpCheckpointer(str(self.home))
        self.storage = StorageType.DISK
        self.steps = 0
        self.pending = False

    def save(self, folder: Path) -> None:
        self.steps += 1
        path = str(folder / "state.pt")
        self.checkpointer.save_checkpoint(self.steps, self.state(), path, self.storage)
        self.pending = True

    def wait(self) -> None:
        """Until its tracker names the step; rank 0 alone saves, so it alone waits."""
        if not self.pending or self.context.rank:
            return
        from dlrover.python.common.constants import CheckpointConstant

        tracker, deadline = self.home / CheckpointConstant.TRACER_FILE_NAME, time.monotonic() + WAIT
        while not tracker.exists() or tracker.read_text() != str(self.steps):
            if time.monotonic() > deadline:
                raise TimeoutError(f"dlrover has not written step {self.steps} in {WAIT:.0f} s")
            time.sleep(PAUSE)
        self.pending = False

    def load(self, folder: Path) -> None:
        found = torch.load(folder / "state.pt", weights_only=True)
        self.model.load_state_dict(found["model"])
        copy_optimizer(self.optimizer, found["optim"]["state"])

    def close(self) -> None:
        """It leaves its process, its sockets and its shared memory behind."""
        engine = self.checkpointer._engine
        if self.context.rank == 0:
            engine._shm_handler.unlink()
        engine.close()
        if engine.saver_proc is not None:
            engine.saver_proc.terminate()
            engine.saver_proc.join(10)
            shutil.rmtree(Path(tempfile.gettempdir(), "ckpt_sock", self.job), ignore_errors=True)
