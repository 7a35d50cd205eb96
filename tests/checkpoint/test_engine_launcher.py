"""Under the launcher, which ends whatever its ranks leave behind: but not a node's engine."""

from __future__ import annotations

from pathlib import Path

import sapwood as package
from tests.checkpoint.engines import see_end
from tests.checkpoint.training import Training
from tests.cli.helpers import sapwood

SCRIPT = """
import os, signal
from pathlib import Path
import sapwood
from tests.checkpoint.training import Training

training = Training(Path.cwd())
c = sapwood.Checkpointer(training.run, "ckpts", every=1, mode="sharded", linger=0.5)
Path(f"engine-{c._engine.pid}").touch()
training.steps(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_engine_outlives_ranks_and_launcher_until_all_is_safe(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = sapwood(
        "run",
        "script.py",
        tmp_path=tmp_path,
        # Longer than the launcher waits for what is left.
        SAPWOOD_FAULTS="engine.put:sleep:4@1[tier=external,step=2]",
        PYTHONPATH=f"{Path(package.__file__).parents[1]}:{Path(__file__).parents[2]}",
    )
    assert done.returncode != 0
    (name,) = tmp_path.glob("engine-*")
    see_end(int(name.name.partition("-")[2]))
    again = Training(tmp_path)
    with package.Checkpointer(again.run, tmp_path / "ckpts", engine="sync") as c:
        assert c.restore(2).id.step == 2
    again.close()
