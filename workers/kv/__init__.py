"""The KV core: pages, page tables, prefix index, sessions, audit. Pure and deterministic (laws L1-L7)."""

from workers.kv.audit import AuditReport
from workers.kv.cache import SessionCache
from workers.kv.page_table import PageCopy, TableUpdate
from workers.kv.pages import PagePool
from workers.kv.prefix import PrefixEntry, PrefixIndex
from workers.kv.slot import Outcome, Slot, new_tokens

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
    "new_tokens",
]
