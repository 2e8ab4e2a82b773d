"""Text from tokens that arrive one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 8
"""Last tokens of the prompt, which are decoded with the text."""


class TokenText:
    """Decodes tokens as soon as their characters are complete.

    The parts together are the text of all tokens, as far as the first stop string.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """
        Args:
            decode: Decodes ids; bytes of an incomplete character as U+FFFD.
            stops: Strings that end the text and are not part of it.
            prompt: Ids that precede the text, which some tokenizers separate from it by a space.
        """
        self._decode = decode
        self._stops = stops
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        if decode(self._ids).endswith("\ufffd"):  # it ends within a character
            self._ids = []
        self._context = 0
        """Ids before the first one without text; some tokenizers decode by what precedes."""
        self._known = len(self._ids)
        """Ids whose text is complete."""
        self._held = ""
        """Text that may be the start of a stop string."""
        self._has_stopped = False

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        self._ids.append(token)
        return self._new_text(is_last=False)

    def finish(self) -> str:
        """The remaining characters."""
        return self._new_text(is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        before = self._decode(self._ids[self._context : self._known])
        after = self._decode(self._ids[self._context :])
        if len(after) > len(before) and (is_last or not after.endswith("\ufffd")):
            self._held += after[len(before) :]
            self._context = self._known
            self._known = len(self._ids)
        if self._has_stopped:
            return ""
        ends = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if ends:
            self._has_stopped = True
            return self._held[: min(ends)]
        keep = (
            0 if is_last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        )
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that is the start of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
