"""Sessions by tenant: the names of two tenants' sessions never meet, in the journal, on workers or in their KV."""

from __future__ import annotations

import re

SEPARATOR = "\x1f"
"""Between a tenant and the id of its session. No client can send one: ids have no control characters."""
_TENANT = re.compile(f"[^\\s{SEPARATOR}]*{SEPARATOR}")


def scoped(tenant: str, session_id: str) -> str:
    """A session's name. One that is the tenant's already stays, and without tenants there are only ids."""
    if not tenant or not session_id or session_id.startswith(tenant + SEPARATOR):
        return session_id
    return f"{tenant}{SEPARATOR}{session_id}"


def tenant_of(name: str) -> str:
    """Whose session has that name."""
    return name.rpartition(SEPARATOR)[0]


def shown(name: str) -> str:
    """The id in a session's name: what its tenant calls it."""
    return name.rpartition(SEPARATOR)[2]


def without_tenants(text: str) -> str:
    """A text, with ids in place of sessions' names."""
    return _TENANT.sub("", text) if SEPARATOR in text else text
