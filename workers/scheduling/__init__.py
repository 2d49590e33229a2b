"""Scheduling: turns, admission, chunked prefill, retract. Pure and deterministic."""

from workers.scheduling.scheduler import Scheduler
from workers.scheduling.speculation import Draft, Speculation
from workers.scheduling.step import SchedulerLimits, Step, Work
from workers.scheduling.turn import DraftCounts, Finish, Grammar, SamplingParams, Turn

__all__ = [
    "Draft",
    "DraftCounts",
    "Finish",
    "Grammar",
    "SamplingParams",
    "Scheduler",
    "SchedulerLimits",
    "Speculation",
    "Step",
    "Turn",
    "Work",
]
