"""Documents cut into sentences, for models such as BERT and T5 that are trained on them.

Owns which splitter a run takes: nltk's punkt where it has a model of the language, else the rules
of `sentence_rules.py`. nltk is imported only by who asks for it here. Knows no tokenizer and no
token files.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, Protocol

from megatron_ds.data.tokenizer_metadata import SplitterDescription
from megatron_ds.preprocess import sentence_rules

SPLITTERS = ("auto", "punkt", "rules")
RULES_LANGUAGES = (
    *("chinese", "czech", "danish", "dutch", "english", "estonian", "finnish", "french", "german"),
    *("greek", "italian", "japanese", "malayalam", "norwegian", "polish", "portuguese", "russian"),
    *("slovene", "spanish", "swedish", "turkish"),
)
"""Those that nltk publishes models of, under its names, and two that need no abbreviations."""
DOWNLOAD = "python -m nltk.downloader punkt_tab"
INSTALL = "pip install 'megatron_ds[preprocess]'"
LONGEST_WORD = 200
"""Characters of a word that punkt gets to see: all of it, but for what is no word."""


class Splitter(Protocol):
    """Text to sentences. Implementations can be pickled: preprocessing hands them to workers."""

    @property
    def description(self) -> SplitterDescription:
        """What decides the sentences; kept beside the data."""

    def __call__(self, text: str) -> list[str]:
        """The sentences in their order; nothing but space between them is left out.

        With keep_newlines each but the last has the space that follows it, too.
        """


class RuleSplitter:
    """Sentences by the built-in rules. why: what to tell the user of the choice."""

    def __init__(self, lang: str, keep_newlines: bool, why: str = "") -> None:
        self._lang, self._keep, self._why = lang, keep_newlines, why

    @property
    def description(self) -> SplitterDescription:
        version = sentence_rules.VERSION
        return {"splitter": "rules", "version": version, "keep_newlines": self._keep}

    def __str__(self) -> str:
        foreign = "" if self._lang == "english" else ", which know abbreviations of English alone"
        return f"the built-in rules{foreign}{self._why}"

    def __call__(self, text: str) -> list[str]:
        if not self._keep:
            return [text[begin:end] for begin, end, _ in sentence_rules.spans(text)]
        found = [(begin, following) for begin, _, following in sentence_rules.spans(text)]
        sentences = [text[begin:following] for begin, following in found]
        if found:  # punkt has the space before the first and not that after the last
            sentences[0] = text[: found[0][0]] + sentences[0]
            sentences[-1] = sentences[-1].rstrip()
        return sentences


class PunktSplitter:
    """Sentences by nltk's punkt, with the model of a language that is among nltk's data.

    Raises LookupError if there is none, ImportError without nltk, and ValueError for a broken one.
    """

    def __init__(self, lang: str, keep_newlines: bool) -> None:
        self._lang, self._keep = lang, keep_newlines
        punkt = importlib.import_module("nltk.tokenize.punkt")
        self._source, parameters = _model(punkt, lang)
        self._sha256 = _sha256(parameters)
        variables = _keeping_space(punkt) if keep_newlines else None
        self._tokenizer = punkt.PunktSentenceTokenizer(parameters, lang_vars=variables)

    def __reduce__(self) -> tuple[type[PunktSplitter], tuple[str, bool]]:
        return PunktSplitter, (
            self._lang,
            self._keep,
        )  # nltk's objects with other rules cannot be pickled

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
        return f"nltk's punkt ({self._lang}, {self._source})"

    def __call__(self, text: str) -> list[str]:
        sentences: list[str] = self._tokenizer.tokenize(text)
        return sentences


def choose_splitter(lang: str, keep_newlines: bool, splitter: str = "auto") -> Splitter:
    """What cuts texts of a language, under nltk's name for it, into sentences.

    auto: punkt if nltk and its model of the language are there, else the rules. Raises ValueError,
    naming the flag and what is there, for an unknown language and for punkt that is not there.
    """
    if splitter == "rules":
        _require_rules(lang, "")
        return RuleSplitter(lang, keep_newlines)
    try:
        return PunktSplitter(lang, keep_newlines)
    except ImportError as error:
        missing, remedy = f"nltk cannot be imported ({error})", INSTALL
        there = ""
    except LookupError:
        missing, remedy = f"nltk has no punkt model of {lang} here", DOWNLOAD
        there = f"; it has {', '.join(_languages()) or 'none'}"
    if splitter == "punkt":
        raise ValueError(f"--sentence-splitter punkt: {missing}{there}; get it with {remedy}")
    _require_rules(lang, f"{missing}{there}, and ")
    return RuleSplitter(lang, keep_newlines, f": {missing} ({remedy})")


def _require_rules(lang: str, beside: str) -> None:
    if lang not in RULES_LANGUAGES:
        raise ValueError(
            f"--lang {lang}: {beside}the built-in rules are for {', '.join(RULES_LANGUAGES)}"
        )


def _model(punkt: Any, lang: str) -> tuple[str, Any]:
    """Which of nltk's data, and the parameters in it. Raises LookupError if there are none, and
    ValueError if they are broken."""
    if not lang.replace("-", "").replace("_", "").isalnum():
        raise LookupError(lang)  # a path, which might lead anywhere
    find = importlib.import_module("nltk.data").find
    kinds = {f"punkt_tab/{lang}/": punkt.load_punkt_params}
    # The older data are pickles, which nltk reads without running what else may be in them.
    load: Any = getattr(punkt, "punkt_pickle_load", None)

    def unpickle(found: Any) -> Any:
        with found.open() as file:
            return load(file)._params

    if load is not None:
        kinds |= {f"{folder}/{lang}.pickle": unpickle for folder in ("punkt/PY3", "punkt")}
    for name, read in kinds.items():
        try:
            found = find(f"tokenizers/{name}")
        except LookupError:
            continue
        try:
            return name.split("/")[0], read(found)
        except Exception as error:  # of any kind: what is in the file decides
            raise ValueError(
                f"--lang {lang}: nltk's model {found} cannot be read ({error}); get it again with "
                f"{DOWNLOAD}, or give --sentence-splitter rules"
            ) from error
    raise LookupError(lang)


def _languages() -> list[str]:
    """Those that nltk has unpacked models of."""
    found: set[str] = set()
    for root in importlib.import_module("nltk.data").path:
        folder = Path(root) / "tokenizers"
        for model in (*folder.glob("punkt_tab/*"), *folder.glob("punkt/**/*.pickle")):
            if os.path.isdir(model) or model.suffix == ".pickle":
                found.add(model.stem)
    return sorted(found)


def _keeping_space(punkt: Any) -> Any:
    """Punkt's rules of a language with the space after a sentence as a part of it.

    nltk reads where a sentence may end from `_period_context_fmt`: a match ends where the sentence
    does, `next_tok` is where the next one begins, and `after_tok` is what punkt decides by. With
    --keep-newlines, Megatron lets the match have the space, of which there may then be none.
    """
    pattern = (
        r"\S{0,LONGEST}%(SentEndChars)s\s*"  # all of a word, to begin with its last end
        r"(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S{1,LONGEST})))"
    ).replace("LONGEST", str(LONGEST_WORD))
    return type("KeepingSpace", (punkt.PunktLanguageVars,), {"_period_context_fmt": pattern})()


def _sha256(parameters: Any) -> str:
    """Of all that a model of punkt knows."""
    sets = (parameters.abbrev_types, parameters.collocations, parameters.sent_starters)
    content = [*map(sorted, sets), sorted(parameters.ortho_context.items())]
    return hashlib.sha256(repr(content).encode()).hexdigest()
