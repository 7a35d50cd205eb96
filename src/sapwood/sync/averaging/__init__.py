"""Ways to average a bucket over the ranks: directly, or through the memory of each machine."""

from sapwood.sync.averaging.base import Averager, BucketMemory
from sapwood.sync.averaging.choose import Averaging, choose_averager

__all__ = ["Averager", "Averaging", "BucketMemory", "choose_averager"]
