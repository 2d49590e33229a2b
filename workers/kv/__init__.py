"""The KV core: pages, prefix index, sessions, audit. Pure and deterministic (DESIGN.md, laws L1-L7)."""

from workers.kv.audit import AuditReport, audit
from workers.kv.pages import PagePool
from workers.kv.prefix import PrefixEntry, PrefixIndex
from workers.kv.sessions import Outcome, PageCopy, SessionCache, Slot, TableUpdate

__all__ = [
    "AuditReport",
    "Outcome",
    "PageCopy",
    "PagePool",
    "PrefixEntry",
    "PrefixIndex",
    "SessionCache",
    "Slot",
    "TableUpdate",
    "audit",
]
