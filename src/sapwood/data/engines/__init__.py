"""Ways to read the records of batches: one contract, one file for each way."""

from __future__ import annotations

from sapwood.data.engines.base import Engine, EngineSettings, Job
from sapwood.data.engines.choose import POLICIES, SHARED, Policy, choose

__all__ = ["POLICIES", "SHARED", "Engine", "EngineSettings", "Job", "Policy", "choose"]
