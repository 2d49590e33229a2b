"""SGLang's ``/v1/score``: how likely each of some tokens is after each of some texts.

Judges and rerankers ask a model for its next token and read the answers' chances: "yes" against "no".
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, TypeAlias

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.errors import InvalidRequest
from holdfast.tokens import out_of_vocabulary
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.fields import TokenId, WantedTokens
from router.faces.http import Tenant, until_disconnect
from router.faces.openai.generation import check_model
from router.faces.several import MAX_TURNS, collect_all
from router.inputs import of_tokens
from router.turns.turn import TurnRequest

Ids: TypeAlias = list[TokenId]


class ScoreBody(BaseModel):
    """Texts, or token ids throughout."""

    model: str = ""
    query: str | Ids
    items: str | Annotated[list[str] | list[Ids], Field(max_length=MAX_TURNS)]
    label_token_ids: WantedTokens = Field(min_length=1)
    apply_softmax: bool = False
    """Over the labels alone; otherwise each has its chance among all tokens."""
    item_first: bool = False

    def inputs(self) -> list[str] | list[Ids]:
        """The query with each item. Raises InvalidRequest."""
        query, items = self.query, [self.items] if isinstance(self.items, str) else self.items
        if isinstance(query, str):
            texts = [item for item in items if isinstance(item, str)]
            if len(texts) == len(items):
                return [item + query if self.item_first else query + item for item in texts]
        else:
            lists = [item for item in items if not isinstance(item, str)]
            if len(lists) == len(items):
                return [item + query if self.item_first else query + item for item in lists]
        raise InvalidRequest("items: must be texts if query is one, otherwise lists of token ids", "items")


def score_routes(core: RouterCore) -> APIRouter:
    """The endpoint over a router."""
    routes = APIRouter()

    @routes.post("/v1/score")
    async def score(http: Request, tenant: Tenant, body: ScoreBody) -> Any:
        check_model(core, body.model)
        num_ids = core.fleet.vocab_size or 2**31  # while no worker is there to ask
        wrong = out_of_vocabulary(array("i", body.label_token_ids), num_ids)
        if wrong is not None:
            raise InvalidRequest(
                f"label_token_ids: Token ID {wrong} is out of vocabulary, whose ids are from 0 to {num_ids - 1}",
                "label_token_ids",
            )
        wanted = list(dict.fromkeys(body.label_token_ids))
        requests = [
            TurnRequest(
                tenant,
                core.inputs.of_text(given, special=True) if isinstance(given, str) else of_tokens(array("i", given)),
                session_pb2.Sampling(max_tokens=1, logprobs=0, logprob_token_ids=wanted),
            )
            for given in body.inputs()
        ]
        results = await until_disconnect(http, collect_all(core, requests))
        if isinstance(results, Response):
            return results
        scores = []
        for total, _ in results:
            logprobs = {each.token: each.logprob for each in total.logprobs[0].wanted}
            chances = np.exp([logprobs[label] for label in body.label_token_ids])
            scores.append((chances / chances.sum() if body.apply_softmax else chances).tolist())
        num_tokens = sum(total.prompt_len for total, _ in results)
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        return {"object": "scoring", "model": core.config.served_model_name, "scores": scores, "usage": usage}

    return routes
