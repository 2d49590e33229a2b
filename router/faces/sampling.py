"""The sampling parameters that all HTTP APIs name alike."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from holdfast.v1 import session_pb2
from router.faces.fields import LogitBias, Penalty, RepetitionPenalty, Stops, StopTokens, Temperature, TopK


class SamplingFields(BaseModel):
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: TopK = -1
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias | None = None
    stop: Stops | None = None
    stop_regex: Stops | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool = False

    def sampling_message(self, **others: Any) -> session_pb2.Sampling:
        """The message, with those fields that the APIs name differently in ``others``."""
        return session_pb2.Sampling(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            stop=_listed(self.stop),
            stop_regex=_listed(self.stop_regex),
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
            **others,
        )


def _listed(stops: Stops | None) -> list[str]:
    return [stop for stop in ([stops] if isinstance(stops, str) else stops or []) if stop]
