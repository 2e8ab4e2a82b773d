"""The stage `fix`: broken Unicode, by ftfy."""

from __future__ import annotations

import re

from megatron_ds.cleaning.stages import MISSING_EXTRA, Document, Replaced

SUSPICIOUS = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")
"""What ftfy may change: `&`, control characters, and everything beyond ASCII."""


class FixUnicode:
    """Mends mojibake, HTML entities, ligatures, widths, quotes and line ends; the result is NFC.

    The same as `ftfy.fix_text` with its defaults. Raises ValueError where ftfy is missing.
    """

    name = "fix"

    def __init__(self) -> None:
        try:
            import ftfy
        except ImportError:
            raise ValueError(f"--stages fix: needs ftfy: {MISSING_EXTRA}") from None
        self._fix_text = ftfy.fix_text
        self._config = ftfy.TextFixerConfig(explain=False)

    def __call__(self, document: Document) -> Replaced | None:
        text = document.text
        if SUSPICIOUS.search(text) is None:
            return None
        fixed = self._fixed(text)
        return None if fixed == text else Replaced(fixed)

    def _fixed(self, text: str) -> str:
        """ftfy works line by line and is slow: it gets only the lines that it may change."""
        config = self._config
        lines = text.split("\n")
        lines[:-1] = [line + "\n" for line in lines[:-1]]
        for number, line in enumerate(lines):
            if "<" in line:  # from here on it is HTML, whose entities ftfy leaves alone
                config = config._replace(unescape_html=False)
            if SUSPICIOUS.search(line) is not None:
                lines[number] = self._fix_text(line, config)
        return "".join(lines)
