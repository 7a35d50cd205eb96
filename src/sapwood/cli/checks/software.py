"""Python, torch and what it was built with, and the optional packages."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sapwood.cli.checks.base import Check, note, ok, problem
from sapwood.errors import LaunchError
from sapwood.runtime.launch import check_system

__all__ = ["SOFTWARE"]

_TORCH = "2.13"
_EXTRAS = {
    "cli": ("cyclopts", "rich"),
    "checkpoint": ("xxhash",),
    "compression": ("zstandard",),
    "parity": ("pyeclib",),
    "s3": ("obstore",),
    "data": ("lmdb",),
    "report": ("matplotlib",),
    "web": ("starlette", "uvicorn"),
    "mpi": ("mpi4py", "mpich"),
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
}
"""Those of pyproject.toml that a user may want, and the packages of each."""
_INSTEAD = {"mooncake-transfer-engine-non-cuda": "mooncake-transfer-engine"}
"""A build of the same package, for machines with CUDA."""


def python(folder: Path) -> Check:
    """The interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036 (someone may run us from a copied folder)
        return problem("python", found, "Sapwood needs Python 3.11 or newer")
    return ok("python", found)


def system(folder: Path) -> Check:
    """The operating system."""
    found = f"{platform.system()} {platform.release()}"
    try:
        check_system()
    except LaunchError as error:
        return problem("system", found, str(error))
    return ok("system", found)


def torch_version(folder: Path) -> Check:
    """The version of torch."""
    try:
        import torch
    except ImportError as error:
        return problem("torch", f"cannot be imported: {error}", f"pip install 'torch=={_TORCH}.*'")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    found = f"{torch.__version__} ({built}), {torch.get_num_threads()} threads"
    if not torch.__version__.startswith(_TORCH + "."):
        return problem(
            "torch", found, f"this Sapwood is for {_TORCH}: pip install torch=={_TORCH}.0"
        )
    return ok("torch", found)


def backends(folder: Path) -> Check:
    """The collective backends torch was built with."""
    import torch.distributed as dist

    if not dist.is_available():
        return problem(
            "backends", "torch.distributed is missing", "install an official torch build"
        )
    have = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    found = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in have.items())
    if not (have["gloo"] or have["nccl"]):
        return problem("backends", found, "install an official torch build, which has gloo")
    return ok("backends", found)


def fused_optimizers(folder: Path) -> Check:
    """Whether the fused optimizer kernels work on this machine's default device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    working, missing = [], []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        weight = torch.ones(4, device=device, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        try:
            kind([weight], lr=0.1, fused=True).step()
            working.append(kind.__name__)
        except (RuntimeError, TypeError):
            missing.append(kind.__name__)
    found = f"{', '.join(working) or 'none'} on {device}"
    if missing:
        return note("fused optimizers", found, f"no fused {', '.join(missing)}: updates are slower")
    return ok("fused optimizers", found)


def extras(folder: Path) -> Check:
    """The optional packages."""
    have = [extra for extra, packages in _EXTRAS.items() if all(map(_installed, packages))]
    lacking = [extra for extra in _EXTRAS if extra not in have]
    found = f"installed: {', '.join(have) or 'none'}"
    if lacking:
        return note("extras", found, f"pip install 'sapwood[{','.join(lacking)}]' for the rest")
    return ok("extras", found)


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return package in _INSTEAD and _installed(_INSTEAD[package])
    return True


SOFTWARE = (system, python, torch_version, backends, fused_optimizers, extras)
