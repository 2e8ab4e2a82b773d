"""The stage `url`: drops documents by where they come from.

A file of unwanted addresses has one entry per line; what follows a # is a remark.

    example.com       this host and those below it: www.example.com
    reddit            the name before the end of any host: reddit.com, old.reddit.co.uk
    .pdf              files whose names end so
    regex:/tag/\\d+    addresses in which the pattern is found, in upper or lower case
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import unquote, urlsplit

from megatron_ds.cleaning.stages import Document, Dropped

PICTURES = {".bmp", ".eps", ".gif", ".gifv", ".heic", ".ico", ".jpeg", ".jpg", ".png", ".psd"}
PICTURES |= {".svg", ".tif", ".tiff", ".webp"}
SOUND = {".aac", ".aiff", ".flac", ".m4a", ".mid", ".midi", ".mp3", ".ogg", ".wav", ".wma"}
FILMS = {".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ogv", ".swf", ".webm"}
FILMS |= {".wmv"}
OFFICE = {".doc", ".docx", ".pdf", ".ppt", ".pptx", ".xls", ".xlsx"}
PROGRAMS = {".apk", ".bin", ".css", ".deb", ".dmg", ".exe", ".iso", ".jar", ".js", ".msi", ".otf"}
PROGRAMS |= {".pkg", ".rpm", ".ttf", ".woff"}
ARCHIVES = {".7z", ".bz2", ".gz", ".rar", ".tar", ".tgz", ".xz", ".zip"}
FILE_TYPES = frozenset(PICTURES | SOUND | FILMS | OFFICE | PROGRAMS | ARCHIVES)
"""Ends of files that hold no page of text, whatever a list names."""
SECOND_LEVEL = frozenset(
    ["ac", "co", "com", "edu", "gob", "gov", "govt", "mil", "ne", "net", "nom", "or", "org", "sch"]
)
"""Names that stand before a country's, as in .co.uk, and belong to nobody."""
HOST = re.compile(r"(?!-)[\w-]+(\.[\w-]+)*")
SUFFIX = re.compile(r"(\.\w+)+")
REGEX = "regex:"


class UrlFilter:
    """Drops documents of unwanted hosts, kinds of file and patterns, and of what is no address.

    Documents without an address go on. Raises ValueError with every wrong line of the files.
    """

    name = "url"

    def __init__(self, lists: Sequence[str]) -> None:
        self._hosts: set[str] = set()
        self._names: set[str] = set()
        self._suffixes = set(FILE_TYPES)
        self._patterns: list[re.Pattern[str]] = []
        problems = [problem for path in lists for problem in self._read(path)]
        if problems:
            raise ValueError("\n".join(problems))

    def _read(self, path: str) -> Iterator[str]:
        """Takes a list; yields what is wrong with it."""
        try:
            with open(path, encoding="utf-8-sig") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            yield f"--url-blacklist {path}: cannot be read: {error}"
            return
        for number, line in enumerate(lines, 1):
            entry = line.partition(" #")[0].strip()
            if not entry or entry.startswith("#"):
                continue
            if entry.startswith(REGEX):
                try:
                    self._patterns.append(re.compile(entry.removeprefix(REGEX), re.IGNORECASE))
                except re.error as error:
                    yield f"--url-blacklist {path}:{number}: is no pattern: {error}"
                continue
            entry = entry.lower()
            if SUFFIX.fullmatch(entry):
                self._suffixes.add(entry)
            elif HOST.fullmatch(entry):
                (self._hosts if "." in entry else self._names).add(entry)
            else:
                yield (
                    f"--url-blacklist {path}:{number}: {entry!r} is no host (example.com), no end "
                    f"of a file's name (.pdf) and no {REGEX}PATTERN"
                )

    def __call__(self, document: Document) -> Dropped | None:
        if document.url is None:
            return None
        reason = self.judge(document.url)
        return None if reason is None else Dropped(reason)

    def judge(self, url: str) -> str | None:
        """Why an address is unwanted; None if it is not."""
        try:
            parts = urlsplit(url.strip())
            host = (parts.hostname or "").rstrip(".")
        except ValueError:
            return "no address"
        if parts.scheme not in ("http", "https") or not HOST.fullmatch(host):
            return "no address"
        labels = host.split(".")
        if any(".".join(labels[at:]) in self._hosts for at in range(len(labels))):
            return "unwanted host"
        if self._names and _name_of(labels) in self._names:
            return "unwanted host"
        file = unquote(parts.path).lower().rpartition("/")[2]
        ends = (file[at:] for at, letter in enumerate(file) if letter == ".")
        if any(end in self._suffixes for end in ends):
            return "unwanted kind of file"
        if any(pattern.search(url) for pattern in self._patterns):
            return "unwanted pattern"
        return None


def _name_of(labels: list[str]) -> str:
    """What was registered of a host: `example` of www.example.co.uk."""
    if len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in SECOND_LEVEL:
        return labels[-3]
    return labels[-2] if len(labels) > 1 else labels[0]
