"""The stage `fix`: repairs broken Unicode, using ftfy."""

from __future__ import annotations

import re

from megatron_ds.cleaning.stages import Document, Replaced, missing_package
from megatron_ds.config.problems import UserError

SUSPICIOUS = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")
"""Characters that ftfy may change: `&`, control characters, and everything beyond ASCII."""


class FixUnicode:
    """Repairs mojibake, HTML entities, ligatures, widths, quotes and line ends; the result is NFC.

    Equal to `ftfy.fix_text` with its defaults.

    Raises:
        UserError: If ftfy is not installed.
    """

    name = "fix"

    def __init__(self) -> None:
        try:
            import ftfy
        except ImportError:
            raise UserError(missing_package("fix", "ftfy")) from None
        self._fix_text = ftfy.fix_text
        self._config = ftfy.TextFixerConfig(explain=False)

    def __call__(self, document: Document) -> Replaced | None:
        text = document.text
        if SUSPICIOUS.search(text) is None:
            return None
        fixed = self._fixed(text)
        return None if fixed == text else Replaced(fixed)

    def _fixed(self, text: str) -> str:
        """Apply ftfy, which is slow and works line by line, to the lines that it may change."""
        config = self._config
        lines = text.split("\n")
        lines[:-1] = [line + "\n" for line in lines[:-1]]
        for number, line in enumerate(lines):
            if "<" in line:  # ftfy takes the rest for HTML and keeps its entities
                config = config._replace(unescape_html=False)
            if SUSPICIOUS.search(line) is not None:
                lines[number] = self._fix_text(line, config)
        return "".join(lines)
