"""Request bodies of SGLang's API. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from holdfast.errors import InvalidRequest
from holdfast.v1 import session_pb2, worker_pb2
from router.faces.fields import (
    MAX_TOP_LOGPROBS,
    CountOrNone,
    Int32,
    Int64,
    Name,
    TokenId,
    WantedTokens,
)
from router.faces.grammars import Schema, Text, of_schema, of_structural_tag, of_text, only_one
from router.faces.sampling import SamplingFields
from router.faces.several import MAX_TURNS
from router.faces.sglang.sessions import SessionParams

DEFAULT_MAX_NEW_TOKENS = 128
TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class SamplingBody(SamplingFields):
    model_config = ConfigDict(extra="ignore")

    n: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 1
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    max_new_tokens: CountOrNone | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: CountOrNone = 0
    sampling_seed: Int64 | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: Schema | None = None

    def grammar(self) -> session_pb2.Grammar | None:
        """Raises InvalidRequest if there are several."""
        return only_one(
            of_schema(self.json_schema, "json_schema"),
            of_text("regex", self.regex, "regex"),
            of_text("ebnf", self.ebnf, "ebnf"),
            of_structural_tag(self.structural_tag, "structural_tag"),
        )


class GenerateBody(BaseModel):
    """One prompt."""

    model_config = ConfigDict(extra="ignore")

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: SamplingBody = SamplingBody()
    session_params: SessionParams | None = None
    rid: Name | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Int32 = -1
    top_logprobs_num: TopLogprobs = 0
    token_ids_logprob: WantedTokens | None = None
    return_text_in_logprobs: bool = False

    def each_answer(self, n: int) -> list[GenerateBody]:
        """The body ``n`` times; with a seed, answer i has seed + i."""
        if n == 1:
            return [self]
        bodies = []
        for i in range(n):
            params = self.sampling_params
            if params.sampling_seed is not None:
                params = params.model_copy(update={"sampling_seed": params.sampling_seed + i})
            rid = f"{self.rid}_{i}" if self.rid else None
            bodies.append(self.model_copy(update={"sampling_params": params, "rid": rid}))
        return bodies

    def sampling(self) -> session_pb2.Sampling:
        s = self.sampling_params
        return s.sampling_message(
            seed=s.sampling_seed,
            max_tokens=s.max_new_tokens,
            min_tokens=s.min_new_tokens,
            grammar=s.grammar(),
            show_special_tokens=not s.skip_special_tokens,
            include_stop=s.no_stop_trim,
            logprob_token_ids=(self.token_ids_logprob or []) if self.return_logprob else [],
            logprobs=self.top_logprobs_num if self.return_logprob else None,
            logprob_start=self.logprob_start_len if self.return_logprob and self.logprob_start_len >= 0 else None,
        )


class BatchBody(BaseModel):
    """One prompt or several: a list of texts or of token lists, whose other fields may be lists too."""

    model_config = ConfigDict(extra="ignore")

    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] = SamplingBody()
    session_params: SessionParams | None = None
    rid: Name | list[Name] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: Int32 | list[Int32] = -1
    top_logprobs_num: TopLogprobs | list[TopLogprobs] = 0
    token_ids_logprob: WantedTokens | list[WantedTokens | None] | None = None
    return_text_in_logprobs: bool = False

    @property
    def has_list(self) -> bool:
        """There are several prompts, or a list of one."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    @property
    def n(self) -> int:
        """Answers of each prompt."""
        each = self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params]
        if len({params.n for params in each}) > 1:
            raise InvalidRequest("sampling_params.n: must be the same for all prompts", "sampling_params.n")
        return each[0].n if each else 1

    @property
    def is_batch(self) -> bool:
        """The answer is a list."""
        return self.has_list or self.n > 1

    def parts(self) -> list[GenerateBody]:
        """Each prompt with its fields. Raises InvalidRequest for lists of another length than the prompts'."""
        parts = self._each_prompt()
        if self.n * len(parts) > MAX_TURNS:
            raise InvalidRequest(f"sampling_params.n: at most {MAX_TURNS} answers in one request", "sampling_params.n")
        return [answer for part in parts for answer in part.each_answer(self.n)]

    def _each_prompt(self) -> list[GenerateBody]:
        if not self.has_list:
            for name, value in self:
                if isinstance(value, list) and name not in ("input_ids", "token_ids_logprob"):
                    raise InvalidRequest(f"{name}: must not be a list for one prompt", name)
            if any(isinstance(item, list) for item in self.token_ids_logprob or ()):
                raise InvalidRequest(
                    "token_ids_logprob: must be a flat list of integers for one prompt", "token_ids_logprob"
                )
            return [GenerateBody.model_validate(dict(self))]
        prompts = self.text if isinstance(self.text, list) else self.input_ids or []
        if self.text is not None and self.input_ids is not None:
            raise InvalidRequest("set exactly one of text and input_ids", "text")
        if not 0 < len(prompts) <= MAX_TURNS:
            raise InvalidRequest(f"a batch has from 1 to {MAX_TURNS} prompts, not {len(prompts)}", "text")
        parts: list[dict[str, Any]] = [{"stream": self.stream} for _ in prompts]
        for name, value in self:
            if name in ("stream", "session_params") or value is None:
                continue
            if name == "token_ids_logprob" and not any(isinstance(item, list) for item in value):
                value = [value] * len(prompts)
            if isinstance(value, list) and len(value) != len(prompts):
                raise InvalidRequest(f"{name}: has {len(value)} items for {len(prompts)} prompts", name)
            for i, part in enumerate(parts):
                part[name] = value[i] if isinstance(value, list) else value
                if name == "rid" and not isinstance(value, list):
                    part[name] = f"{value}_{i}"
        return [GenerateBody.model_validate(part) for part in parts]


class OpenSessionBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    capacity_of_str_len: int = 0
    session_id: Name | None = None
    streaming: bool | None = None


class CloseSessionBody(BaseModel):
    session_id: str


class AbortBody(BaseModel):
    rid: str = ""
    abort_all: bool = False


class PauseBody(BaseModel):
    """What becomes of running turns: they end, leave the batch, or keep their pages."""

    mode: Literal["abort", "retract", "in_place"] = "abort"

    def value(self) -> int:
        """The mode as workers know it."""
        return int(worker_pb2.PauseMode.Value(f"PAUSE_MODE_{self.mode.upper()}"))
