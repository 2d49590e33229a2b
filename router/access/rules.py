"""Which role each endpoint needs. What is not here is served to nobody."""

from __future__ import annotations

from holdfast.errors import Forbidden
from router.access.keys import Identity, Keyring

OPEN, USER, OPERATOR, METRICS = "open", "user", "operator", "metrics"

HTTP_RULES = {
    "/health": OPEN,  # load balancers
    "/openapi.json": OPEN,
    "/docs": OPEN,
    "/metrics": METRICS,
    "/v1/loads": METRICS,
    "/load": METRICS,
    "/holdfast/workers": OPERATOR,
    "/holdfast/workers/{worker_id}/drain": OPERATOR,
    "/holdfast/audit": OPERATOR,
    "/holdfast/router": OPERATOR,
    "/pause_generation": OPERATOR,
    "/continue_generation": OPERATOR,
    "/health_generate": USER,
    "/flush_cache": USER,  # the caller's own, unless it is an operator
    "/abort_request": USER,
    "/holdfast/sessions": USER,
    "/holdfast/sessions/{session_id}": USER,
    "/v1/models": USER,
    "/v1/models/{name:path}": USER,
    "/v1/completions": USER,
    "/v1/chat/completions": USER,
    "/v1/messages": USER,
    "/v1/messages/count_tokens": USER,
    "/v1/responses": USER,
    "/v1/responses/input_tokens": USER,
    "/v1/responses/{response_id}": USER,
    "/v1/responses/{response_id}/cancel": USER,
    "/v1/responses/{response_id}/input_items": USER,
    "/v1/conversations": USER,
    "/v1/conversations/{conversation_id}": USER,
    "/v1/conversations/{conversation_id}/items": USER,
    "/v1/conversations/{conversation_id}/items/{item_id}": USER,
    "/v1/files": USER,
    "/v1/files/{file_id}": USER,
    "/v1/files/{file_id}/content": USER,
    "/v1/batches": USER,
    "/v1/batches/{batch_id}": USER,
    "/v1/batches/{batch_id}/cancel": USER,
    "/v1/score": USER,
    "/open_session": USER,
    "/close_session": USER,
    "/generate": USER,
    "/model_info": USER,
    "/get_model_info": USER,
    "/server_info": USER,
    "/version": USER,
    "/get_server_info": USER,
    "/tokenize": USER,
    "/v1/tokenize": USER,
    "/detokenize": USER,
    "/v1/detokenize": USER,
    "/parse_function_call": USER,
    "/separate_reasoning": USER,
}
"""By the route's path; methods of a path need the same."""


def admit(keyring: Keyring, authorization: str | None, rule: str | None) -> Identity | None:
    """Whom a request comes from, if it may do what needs the role ``rule``; None if anybody may.

    Operators may see metrics too. Raises Unauthenticated, Forbidden.
    """
    if rule == OPEN:
        return None
    identity = keyring.identify(authorization)
    if rule is None:
        raise Forbidden("nobody may do this")
    if rule not in identity.roles and not (rule == METRICS and OPERATOR in identity.roles):
        raise Forbidden(f"your key lacks the role {rule!r}; it has {', '.join(sorted(identity.roles)) or 'none'}")
    return identity
