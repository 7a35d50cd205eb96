"""torch's key-value stores, named in one place because torch exports them without types."""

from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store, TCPStore

__all__ = ["GradBucket", "HashStore", "PrefixStore", "Store", "TCPStore"]
