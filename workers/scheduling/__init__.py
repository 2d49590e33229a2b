"""Scheduling: turns, admission, chunked prefill, retract. Pure and deterministic."""

from workers.scheduling.scheduler import Scheduler, SchedulerLimits, Step, Work
from workers.scheduling.turn import Finish, Grammar, SamplingParams, Turn

__all__ = ["Finish", "Grammar", "SamplingParams", "Scheduler", "SchedulerLimits", "Step", "Turn", "Work"]
