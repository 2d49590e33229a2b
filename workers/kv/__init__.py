"""The KV core: pages, page tables, prefix index, sessions, audit. Pure and deterministic (laws L1-L7)."""

from workers.kv.audit import AuditReport, GroupAudit
from workers.kv.cache import SessionCache
from workers.kv.groups import GroupKind, GroupSpec, full_group, latent_group, window_group
from workers.kv.page_table import FREED, PageCopy, TableUpdate
from workers.kv.scopes import OWN_SCOPE, KVScope, OutOfShare
from workers.kv.slot import Outcome, Slot, new_tokens

__all__ = [
    "FREED",
    "OWN_SCOPE",
    "AuditReport",
    "GroupAudit",
    "GroupKind",
    "GroupSpec",
    "KVScope",
    "OutOfShare",
    "Outcome",
    "PageCopy",
    "SessionCache",
    "Slot",
    "TableUpdate",
    "full_group",
    "latent_group",
    "new_tokens",
    "window_group",
]
