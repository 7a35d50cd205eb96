"""What a run's state is: named tensors, and how to describe them."""

from sapwood.state.tensors import (
    clean_name,
    describe_model,
    named_buffers,
    named_parameters,
    optimizer_tensors,
)

__all__ = [
    "clean_name",
    "describe_model",
    "named_buffers",
    "named_parameters",
    "optimizer_tensors",
]
