"""gpt-oss: messages in channels (https://cookbook.openai.com/articles/openai-harmony).

Its library reads tokens, and downloads its vocabulary at run time; this reads the text of any tokenizer.
"""

from __future__ import annotations

import re

from router.formats.deltas import CallDelta, Delta, held_back

MESSAGE, ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony:
    """``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>``."""

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = ""
        """The header so far; None inside a message."""
        self._channel = "final"
        self._call: CallDelta | None = None
        self._num_calls = 0

    def push(self, text: str) -> Delta:
        delta, self._held = Delta(), self._held + text
        while self._held:
            markers = (MESSAGE,) if self._header is not None else ENDS
            at, marker = min(((self._held.find(m), m) for m in markers if m in self._held), default=(-1, ""))
            stop = at if at >= 0 else len(self._held) - max(held_back(self._held, m) for m in markers)
            self._pass_on(self._held[:stop], delta)
            self._held = self._held[stop:]
            if at < 0:
                break
            self._held = self._held[len(marker) :]
            if marker == MESSAGE:
                self._begin_message(delta)
            else:
                self._header = ""
        return delta

    def finish(self) -> Delta:
        delta, held = Delta(), self._held
        self._held = ""
        if self._header is not None and "<|" not in self._header + held:
            delta.text = self._header + held  # no header came: the model left its format
        else:
            self._pass_on(held, delta)
        return delta

    def _begin_message(self, delta: Delta) -> None:
        header, self._header = self._header or "", None
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        self._channel = channel[1] if channel is not None else "final"
        self._call = None
        if recipient is not None:
            self._call = CallDelta(self._num_calls, recipient[1])
            self._num_calls += 1
            delta.calls.append(CallDelta(self._call.index, self._call.name))

    def _pass_on(self, text: str, delta: Delta) -> None:
        if not text:
            return
        if self._header is not None:
            self._header += text
        elif self._call is not None:
            delta.add(Delta(calls=[CallDelta(self._call.index, "", text)]))
        elif self._channel == "analysis":
            delta.reasoning += text
        else:
            delta.text += text
