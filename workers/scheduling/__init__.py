"""Scheduling: turns, admission, chunked prefill, retract. Pure and deterministic."""

from workers.scheduling.scheduler import Scheduler, SchedulerLimits, Step, Work
from workers.scheduling.turn import Finish, SamplingParams, Turn

__all__ = ["Finish", "SamplingParams", "Scheduler", "SchedulerLimits", "Step", "Turn", "Work"]
