"""Sentence splitting, for models such as BERT and T5 that are trained on sentences.

Owns the choice of the splitter: nltk's punkt, or on request the rules of `sentence_rules.py`. nltk
is imported only when punkt is used. Knows no tokenizer and no token files.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any, Protocol

from megatron_ds.config.problems import user_error
from megatron_ds.data.token_files.tokenizer_metadata import SplitterDescription
from megatron_ds.preprocess.documents import sentence_rules

SPLITTERS = ("punkt", "rules")
RULES_LANGUAGES = (
    "chinese",
    "czech",
    "danish",
    "dutch",
    "english",
    "estonian",
    "finnish",
    "french",
    "german",
    "greek",
    "italian",
    "japanese",
    "malayalam",
    "norwegian",
    "polish",
    "portuguese",
    "russian",
    "slovene",
    "spanish",
    "swedish",
    "turkish",
)
"""Languages of nltk's models, by nltk's names, and two that need no abbreviations."""
DATA = "punkt_tab"
"""Name of nltk's data set."""
DOWNLOAD = f"python -m nltk.downloader {DATA}"
INSTALL = "pip install '.[preprocess]'"
LONGEST_WORD = 200
"""Longest word that punkt sees entirely. Longer runs of characters are not words."""


class Splitter(Protocol):
    """Splits texts into sentences. Implementations can be pickled, for worker processes."""

    @property
    def description(self) -> SplitterDescription:
        """Settings that determine the sentences, recorded next to the data."""

    def __call__(self, text: str) -> list[str]:
        """The sentences of a text, without the whitespace between them.

        With `keep_newlines`, each but the last includes the whitespace after it.
        """


class RuleSplitter:
    """Splits sentences by the built-in rules."""

    def __init__(self, lang: str, keep_newlines: bool) -> None:
        self._lang = lang
        self._keep = keep_newlines

    @property
    def description(self) -> SplitterDescription:
        version = sentence_rules.VERSION
        return {"splitter": "rules", "version": version, "keep_newlines": self._keep}

    def __str__(self) -> str:
        foreign = "" if self._lang == "english" else ", which know only English abbreviations"
        return f"the built-in rules{foreign}"

    def __call__(self, text: str) -> list[str]:
        if not self._keep:
            return [text[begin:end] for begin, end, _ in sentence_rules.spans(text)]
        spans = [(begin, following) for begin, _, following in sentence_rules.spans(text)]
        sentences = [text[begin:following] for begin, following in spans]
        if spans:  # as punkt: whitespace before the first sentence is kept, after the last not
            sentences[0] = text[: spans[0][0]] + sentences[0]
            sentences[-1] = sentences[-1].rstrip()
        return sentences


class PunktSplitter:
    """Splits sentences by nltk's punkt, with a model of the language from nltk's data.

    Raises:
        ImportError: If nltk is not installed.
        LookupError: If there is no model of the language.
        UserError: If the model is damaged.
    """

    def __init__(self, lang: str, keep_newlines: bool) -> None:
        self._lang = lang
        self._keep = keep_newlines
        punkt = importlib.import_module("nltk.tokenize.punkt")
        parameters = _read_model(punkt, lang)
        sets = (parameters.abbrev_types, parameters.collocations, parameters.sent_starters)
        content = [*map(sorted, sets), sorted(parameters.ortho_context.items())]
        self._sha256 = hashlib.sha256(repr(content).encode()).hexdigest()
        variables = _keeping_space(punkt) if keep_newlines else None
        self._tokenizer = punkt.PunktSentenceTokenizer(parameters, lang_vars=variables)

    def __reduce__(self) -> tuple[type[PunktSplitter], tuple[str, bool]]:
        # nltk's objects with other rules cannot be pickled.
        return PunktSplitter, (self._lang, self._keep)

    @property
    def description(self) -> SplitterDescription:
        return {
            "splitter": "punkt",
            "lang": self._lang,
            "model": self._sha256,
            "nltk": importlib.import_module("nltk").__version__,
            "keep_newlines": self._keep,
        }

    def __str__(self) -> str:
        return f"nltk's punkt ({self._lang}, {DATA})"

    def __call__(self, text: str) -> list[str]:
        sentences: list[str] = self._tokenizer.tokenize(text)
        return sentences


def choose_splitter(lang: str, keep_newlines: bool, splitter: str = SPLITTERS[0]) -> Splitter:
    """The splitter of a run.

    Args:
        lang: Language, by nltk's name.
        keep_newlines: Whether a sentence includes the whitespace after it.
        splitter: One of `SPLITTERS`.

    Raises:
        UserError: If the splitter is not available for the language.
    """
    if splitter == "rules":
        if lang not in RULES_LANGUAGES:
            raise user_error(
                "no-sentence-rules-for-language", lang=lang, rules=", ".join(RULES_LANGUAGES)
            )
        return RuleSplitter(lang, keep_newlines)
    try:
        return PunktSplitter(lang, keep_newlines)
    except ImportError as error:
        reason = f"nltk cannot be imported ({error})"
        remedy = INSTALL
    except LookupError:
        languages = ", ".join(_languages()) or "none"
        reason = f"nltk has no punkt model of {lang}, only {languages}"
        remedy = DOWNLOAD
    raise user_error("punkt-unavailable", lang=lang, reason=reason, remedy=remedy)


def _read_model(punkt: Any, lang: str) -> Any:
    """The parameters of a language's model in nltk's data.

    Raises:
        LookupError: If there is no model of the language.
        UserError: If the model is damaged.
    """
    if not lang.replace("-", "").replace("_", "").isalnum():
        raise LookupError(lang)  # a path could lead out of nltk's data
    model = importlib.import_module("nltk.data").find(f"tokenizers/{DATA}/{lang}/")
    try:
        return punkt.load_punkt_params(model)
    except Exception as error:  # of any type, depending on the damage
        raise user_error(
            "punkt-model-damaged", lang=lang, found=model, error=error, download=DOWNLOAD
        ) from error


def _languages() -> list[str]:
    """Languages of the unpacked models in nltk's data."""
    folders = [Path(root) / "tokenizers" for root in importlib.import_module("nltk.data").path]
    return sorted({model.name for folder in folders for model in folder.glob(f"{DATA}/*/")})


def _keeping_space(punkt: Any) -> Any:
    """Punkt's language rules, with the whitespace after a sentence as part of it.

    nltk finds possible sentence ends by `_period_context_fmt`: a match ends where the sentence
    ends, `next_tok` is the start of the next one, and punkt decides by `after_tok`. For
    --keep-newlines, Megatron includes the whitespace in the match.
    """
    pattern = (
        r"\S{0,LONGEST}%(SentEndChars)s\s*"  # the longest match ends at the word's last end
        r"(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S{1,LONGEST})))"
    ).replace("LONGEST", str(LONGEST_WORD))
    return type("KeepingSpace", (punkt.PunktLanguageVars,), {"_period_context_fmt": pattern})()
