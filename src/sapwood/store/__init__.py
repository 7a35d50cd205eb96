"""A repository of models with access to single tensors.

repo = sapwood.store.open("models/")
repo.save(model, "nt3/run7@step-500", parent="nt3/run7@step-400", tags=["best"])
repo.load("nt3/run7@step-500", into=model, layers="conv*")
repo.open("nt3/run7@step-500")["dense.weight"][0:128]
"""

from sapwood.store.opening import open
from sapwood.store.repository import Repository
from sapwood.store.stored import StoredModel, StoredTensor

__all__ = ["Repository", "StoredModel", "StoredTensor", "open"]
