"""Train from an LMDB database; stop it anywhere, and go on in mid-epoch on more or fewer ranks.

Install, in a copy of the repository:   pip install '.[cli,checkpoint,data]'

Start it:                sapwood run -n 2 examples/05_data.py
Go on, on four ranks:    sapwood run -n 4 examples/05_data.py --steps 400

Without `--database` it makes a small one, samples.mdb, of an array and its labels. A database of
your own needs no conversion: say what a record is in `decode`. `sapwood data convert` makes one of
images, .npy, tar and safetensors files.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sapwood
from sapwood.data import Batch, LmdbReader, convert

FEATURES, CLASSES = 64, 10
RECORD = np.dtype([("x", "<f4", FEATURES), ("y", "<i4")])


def make_database(path: Path, records: int = 5000) -> None:
    """One structured array, whose rows become records; a command line would do as well."""
    chance = np.random.default_rng(1)
    rows = np.empty(records, RECORD)
    rows["x"] = chance.standard_normal((records, FEATURES))
    rows["y"] = (rows["x"] @ chance.standard_normal((FEATURES, CLASSES))).argmax(axis=1)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/samples.npy", rows)
        convert(f"{folder}/samples.npy", path)


def decode(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    rows = batch.data.view(RECORD)  # all records of the batch at once
    return torch.from_numpy(rows["x"].copy()), torch.from_numpy(rows["y"].astype(np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--database", type=Path, help="an LMDB file whose records decode() knows")
    parser.add_argument("--batch", type=int, default=240, help="records of a step, of all ranks")
    parser.add_argument("--steps", type=int, default=100, help="the step to train to")
    parser.add_argument("--every", type=int, default=15, help="steps between checkpoints")
    parser.add_argument("--place", default="ckpts-data", help="a folder, or s3://bucket/prefix")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with sapwood.Run(model, optimizer) as run:
        path = options.database or Path("samples.mdb")
        if options.database is None and run.rank == 0 and not path.exists():
            make_database(path)
        run.group.share_text("database", "made")  # the others wait for rank 0

        reader = LmdbReader(path, options.batch, epochs=None, decode=decode, trace=run.trace)
        # The position is the same on every rank, and so it fits any number of them.
        with sapwood.Checkpointer(
            run, options.place, every=options.every, shared={"data": reader}
        ) as ckpt:
            ckpt.restore_latest()
            if run.rank == 0:
                at = reader.state_dict()
                print(
                    f"{run.world} ranks, from step {run.step_count}: epoch {at['epoch']}, "
                    f"batch {at['batch']} of {reader.batches}"
                )
            batches = iter(reader)
            while run.step_count < options.steps:
                x, y = next(batches)
                loss = nn.functional.cross_entropy(run.model(x), y)
                loss.backward()
                run.step()
                if run.rank == 0 and run.step_count % 20 == 0:
                    print(f"step {run.step_count:4d}  epoch {reader.epoch}  loss {loss.item():.4f}")
            ckpt.save()
        reader.close()


if __name__ == "__main__":
    main()
