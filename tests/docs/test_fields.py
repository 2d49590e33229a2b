"""docs/api.md names every field that a request may have."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from router.faces.anthropic.bodies import MessagesBody
from router.faces.openai.batches import CreateBatchBody
from router.faces.openai.chat import ChatBody
from router.faces.openai.completions import CompletionBody
from router.faces.openai.response_body import ResponseBody
from router.faces.sglang.bodies import BatchBody, SamplingBody
from tests.docs.test_docs import ROOT

DOCUMENTED = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "api.md").read_text()))


BODIES = [ChatBody, CompletionBody, ResponseBody, CreateBatchBody, BatchBody, SamplingBody, MessagesBody]


@pytest.mark.parametrize("body", BODIES)
def test_every_field_is_documented(body: type[BaseModel]) -> None:
    assert {field.alias or name for name, field in body.model_fields.items()} <= DOCUMENTED
