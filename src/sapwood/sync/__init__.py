"""Averaging gradients and updating weights layer by layer, with an event for each update."""

from sapwood.sync.averaging import Averaging, choose_averager
from sapwood.sync.base import Context, StepOutcome, Synchroniser, SyncSettings, SyncStats
from sapwood.sync.engines import make_engine
from sapwood.sync.members import Members, check_model
from sapwood.sync.optim import Views, choose_mode
from sapwood.sync.startvalues import give_rank0_values
from sapwood.sync.supported import Claim, check_kinds, check_scaler, check_schedulers
from sapwood.sync.tune import Tuner

__all__ = [
    "Averaging",
    "Claim",
    "Context",
    "Members",
    "StepOutcome",
    "SyncSettings",
    "SyncStats",
    "Synchroniser",
    "Tuner",
    "Views",
    "check_kinds",
    "check_model",
    "check_scaler",
    "check_schedulers",
    "choose_averager",
    "choose_mode",
    "give_rank0_values",
    "make_engine",
]
