"""KV groups: sets of layers whose KV lives and dies together, and so shares one page table a slot.

A *whole-prefix* group (``full``, ``latent``) keeps every position of a sequence. A ``window`` group keeps
what sliding-window layers can still attend to. Recurrent layers will form a kind of their own, whose
slots hold fixed-size states and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """What the layers of a group keep of each position."""

    FULL = "full"
    """K and V of every KV head."""
    LATENT = "latent"
    """Multi-head latent attention (arXiv:2405.04434): one vector, the same on every tensor-parallel rank."""
    WINDOW = "window"
    """K and V of every KV head, for the last ``window`` positions."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of a model: its kind and the pages of its pool."""

    kind: GroupKind
    num_pages: int
    window: int = 0
    """Tokens that a token attends to, itself included; 0 for whole-prefix groups."""

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.WINDOW) != (self.window > 0):
            raise ValueError(f"a {self.kind.value} group cannot have a window of {self.window} tokens")

    @property
    def name(self) -> str:
        """``full``, ``latent`` or ``window 128``: unique in a model."""
        return f"{self.kind.value} {self.window}" if self.window else self.kind.value


def full_group(num_pages: int) -> GroupSpec:
    """A group of full attention layers."""
    return GroupSpec(GroupKind.FULL, num_pages)


def latent_group(num_pages: int) -> GroupSpec:
    """A group of multi-head latent attention layers."""
    return GroupSpec(GroupKind.LATENT, num_pages)


def window_group(num_pages: int, window: int) -> GroupSpec:
    """A group of layers that attend to the last ``window`` tokens."""
    return GroupSpec(GroupKind.WINDOW, num_pages, window)


def window_pages(window: int, page_size: int, num_resume_points: int, step_tokens: int) -> int:
    """The most pages of a window group that a turn holds while it computes ``step_tokens`` a step.

    A window before the committed length, the turn's start and each of the last turns' starts, and the step's own.
    """
    return (num_resume_points + 2) * (-(-window // page_size) + 1) + -(-step_tokens // page_size) + 1
