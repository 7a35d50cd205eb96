"""Operations that ask about a tensor without reading its values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["METADATA"]


def _metadata() -> frozenset[Any]:
    getters = (
        *("grad", "_grad", "grad_fn", "_grad_fn", "requires_grad", "is_leaf", "retains_grad"),
        *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "output_nr"),
        *("is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized", "is_mkldnn", "is_nested"),
        *("_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
    )
    methods = (
        *("size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_same_size", "__hash__"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
        "__len__",
    )
    found: set[Any] = set()
    for name in getters:
        descriptor = getattr(Tensor, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, access):
                found.add(getattr(descriptor, access))
    found |= {getattr(Tensor, name) for name in methods if hasattr(Tensor, name)}
    return frozenset(found)


METADATA = _metadata()
"""As a ``__torch_function__`` sees them."""
