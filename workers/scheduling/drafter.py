"""Where a turn's drafts come from: its own history, the request's prediction, its tenant's recent outputs."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from workers.scheduling.ngram import NEAR, SIZES, Match, NgramIndex, Source, key_of
from workers.scheduling.turn import Turn

MAX_INDEXED = 2**24
"""Entries of the indexes of all sessions, four bytes each. The least recently used session's is dropped first."""
MAX_RECENT = 2**15
"""Tokens of recent outputs, for each tenant. Twice as many at most are kept."""
MAX_TENANTS = 64
MAX_INTERVAL, MAX_INTERVAL_PREDICTED, MAX_INTERVAL_NEW = 16, 2, 64
"""Tokens between two lookups of a turn that finds nothing, or nothing that holds; of one with a prediction; and of one
that has never found what held: most of its lookups are for nothing."""
SEPARATOR = -1
"""Between recent outputs. No token equals it."""
PREDICTED = 16
"""What a prediction's beginning counts as, in tokens of a match."""


@dataclass(slots=True)
class _Recent:
    """A tenant's recent outputs."""

    source: Source = field(default_factory=lambda: Source(array("i")))
    num_dropped: int = 0
    """Tokens that came before those of ``source``."""
    sessions: dict[str, int] = field(default_factory=dict)
    """Whose outputs these are, and where each one's last begins among all tokens."""

    def add(self, output: array[int], session_id: str) -> None:
        if len(self.source.tokens) + len(output) > 2 * MAX_RECENT:
            self.num_dropped += max(0, len(self.source.tokens) - MAX_RECENT)
            self.source = Source(self.source.tokens[-MAX_RECENT:])
            self.sessions = {name: at for name, at in self.sessions.items() if at + MAX_RECENT > self.num_dropped}
        tokens, index = self.source.tokens, self.source.index
        self.sessions[session_id] = self.num_dropped + len(tokens)
        tokens.extend(output[-MAX_RECENT:])
        index.extend(tokens, len(tokens) - 1)
        tokens.append(SEPARATOR)
        # The output's end is not indexed: nothing follows it, and an older place where something does is kept.
        index.num_indexed = len(tokens)


@dataclass(slots=True)
class _Followed:
    """A live turn."""

    history: Source
    prediction: Source | None
    seen: int = 0
    """The length up to which its match is known to hold."""
    began: int = 0
    """The match's length when it was found."""
    interval: int = 1
    has_matched: bool = False
    """A match has held."""
    left_at: int = 0
    """Where the output left the prediction."""
    left_len: int = -NEAR
    """The turn's length then."""


class NgramDrafter:
    """Follows live turns, and finds where their last tokens occurred before. Pure: no clock, no randomness."""

    def __init__(self) -> None:
        self.matches: dict[Turn, Match] = {}
        """Where turns may continue: their last tokens were seen there before."""
        self._turns: dict[Turn, _Followed] = {}
        self._indexes: OrderedDict[str, NgramIndex] = OrderedDict()
        """By session, least recently used first."""
        self._recent: OrderedDict[str, _Recent] = OrderedDict()

    def begin(self, turn: Turn) -> None:
        """Follow a turn. After a failover it has output already."""
        index = self._indexes.pop(turn.session_id, None) or NgramIndex()
        index.cut(turn.keep_len)
        if not turn.ephemeral:
            self._indexes[turn.session_id] = index
        prediction = Source(turn.prediction) if turn.prediction else None
        followed = self._turns[turn] = _Followed(Source(turn.tokens, index), prediction)
        if prediction is not None and not turn.num_output:
            self.matches[turn] = Match(prediction, 0, PREDICTED)
            followed.began, followed.seen = PREDICTED, turn.prompt_len

    def receive(self, turn: Turn) -> tuple[int, int, bool]:
        """The turn has new tokens. Returns its match's length before, how many of them held, and whether one did not.

        0, 0 and False if there was no match.
        """
        followed, match = self._turns[turn], self.matches.get(turn)
        length = held = 0
        lost = False
        if match is not None:
            new, followed.seen = turn.tokens[followed.seen :], len(turn.tokens)
            length, held = match.length, match.follow(new)
            if lost := held < len(new):
                self._lost(turn, followed, match)
        if (match is None or lost) and len(turn.tokens) >= turn.look_at:
            self._look(turn, followed)
        return length, held, lost

    def _lost(self, turn: Turn, followed: _Followed, match: Match) -> None:
        """A turn's match did not hold. If it never did, it was chance, and the next lookup is worth less."""
        del self.matches[turn]
        lasted = match.length > followed.began
        if lasted and match.source is followed.prediction:
            followed.left_at, followed.left_len = match.position, len(turn.tokens)
        followed.has_matched |= lasted
        followed.interval = 1 if lasted else self._longer(followed)
        turn.look_at = followed.seen + followed.interval - 1

    def _longer(self, followed: _Followed) -> int:
        limit = MAX_INTERVAL if followed.has_matched else MAX_INTERVAL_NEW
        return min(limit if followed.prediction is None else MAX_INTERVAL_PREDICTED, 2 * followed.interval)

    def _look(self, turn: Turn, followed: _Followed) -> None:
        match = self._find(turn, followed)
        if match is None:
            followed.interval = self._longer(followed)
            turn.look_at = len(turn.tokens) + followed.interval
        else:
            self.matches[turn] = match
            followed.began, followed.seen, turn.look_at = match.length, len(turn.tokens), 0

    def is_behind(self, turn: Turn) -> bool:
        """Whether the turn has tokens that its match was not compared with."""
        return self._turns[turn].seen < len(turn.tokens)

    def is_predicted(self, turn: Turn, match: Match) -> bool:
        """Whether the match is in the request's prediction."""
        return match.source is self._turns[turn].prediction

    def forget(self, turn: Turn) -> None:
        """The turn has ended. Its output is its tenant's most recent."""
        self.matches.pop(turn, None)
        if self._turns.pop(turn, None) is None:
            return
        self._bound_indexes()
        output = turn.tokens[turn.prompt_len :]
        if not output:
            return
        recent = self._recent.pop(turn.tenant, None) or _Recent()
        self._recent[turn.tenant] = recent
        recent.add(output, turn.session_id)
        if len(self._recent) > MAX_TENANTS:
            self._recent.popitem(last=False)

    def release(self, session_id: str) -> None:
        """Nothing of a released session is kept."""
        self._indexes.pop(session_id, None)
        for tenant in [tenant for tenant, recent in self._recent.items() if session_id in recent.sessions]:
            del self._recent[tenant]

    def _find(self, turn: Turn, followed: _Followed) -> Match | None:
        tokens, prediction, recent = turn.tokens, followed.prediction, self._recent.get(turn.tenant)
        if len(tokens) < SIZES[-1]:
            return None
        key = key_of(tokens)
        best = followed.history.find(tokens, key, repeats=True)
        for source in (prediction, recent.source if recent is not None else None):
            match = source.find(tokens, key) if source is not None else None
            if match is not None and (best is None or match.length > best.length):
                best = match
        if best is None and prediction is not None and len(tokens) < followed.left_len + NEAR:
            # An edit has changed a few tokens: the prediction continues after them.
            best = prediction.find_near(tokens[-1], followed.left_at)
        return best

    def _bound_indexes(self) -> None:
        total = sum(map(len, self._indexes.values()))
        while total > MAX_INDEXED and len(self._indexes) > 1:
            total -= len(self._indexes.popitem(last=False)[1])
