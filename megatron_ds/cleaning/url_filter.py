"""The stage `url`: drops documents by their address.

A block list has one entry per line; text after a # is a comment.

    example.com       this host and its subdomains: www.example.com
    reddit            the registered name of a host: reddit.com, old.reddit.co.uk
    .pdf              files with this suffix
    regex:/tag/\\d+    addresses that contain the pattern, ignoring case
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megatron_ds.cleaning.stages import Document, Dropped
from megatron_ds.config.problems import Problem, raise_if_any

PICTURES = ".bmp .eps .gif .gifv .heic .ico .jpeg .jpg .png .psd .svg .tif .tiff .webp"
SOUND = ".aac .aiff .flac .m4a .mid .midi .mp3 .ogg .wav .wma"
FILMS = ".3gp .avi .m4v .mkv .mov .mp4 .mpeg .mpg .ogv .swf .webm .wmv"
OFFICE = ".doc .docx .pdf .ppt .pptx .xls .xlsx"
PROGRAMS = ".apk .bin .css .deb .dmg .exe .iso .jar .js .msi .otf .pkg .rpm .ttf .woff"
ARCHIVES = ".7z .bz2 .gz .rar .tar .tgz .xz .zip"
FILE_TYPES = frozenset(" ".join([PICTURES, SOUND, FILMS, OFFICE, PROGRAMS, ARCHIVES]).split())
"""Suffixes of files that are not text pages."""
SECOND_LEVEL = frozenset(
    ["ac", "co", "com", "edu", "gob", "gov", "govt", "mil", "ne", "net", "nom", "or", "org", "sch"]
)
"""Second-level domains of countries, as in .co.uk, which are not registered names."""
HOST = re.compile(r"(?!-)[\w-]+(\.[\w-]+)*")
SUFFIX = re.compile(r"(\.\w+)+")
REGEX = "regex:"
MAX_NAME = 255
"""Characters of a host, and of the end of a file's name in which suffixes are searched. An address
in crawled text may have any length."""


class UrlFilter:
    """Drops documents with blocked hosts, file types or patterns, and with invalid addresses.

    Documents without an address continue.

    Raises:
        UserError: With every invalid line of the lists.
    """

    def __init__(self, lists: Sequence[str]) -> None:
        self._hosts: set[str] = set()
        self._names: set[str] = set()
        self._suffixes = set(FILE_TYPES)
        self._patterns: list[re.Pattern[str]] = []
        self.settings: dict[str, list[str]] = {"url_blacklist": []}
        raise_if_any(problem for path in lists for problem in self._read(path))

    def _read(self, path: str) -> Iterator[Problem]:
        """Read a list; yields the invalid entries."""
        try:
            content = Path(path).read_bytes()
            lines = content.decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            yield _list_problem(path, f"cannot be read: {error}")
            return
        version = sha256(content).hexdigest()[:12]
        self.settings["url_blacklist"].append(f"{path} ({version})")
        for line_number, line in enumerate(lines, 1):
            entry = line.partition(" #")[0].strip()
            if not entry or entry.startswith("#"):
                continue
            if entry.startswith(REGEX):
                try:
                    self._patterns.append(re.compile(entry.removeprefix(REGEX), re.IGNORECASE))
                except re.error as error:
                    yield _list_problem(f"{path}:{line_number}", f"invalid pattern: {error}")
                continue
            entry = _unicode_host(entry.lower())
            if SUFFIX.fullmatch(entry):
                self._suffixes.add(entry)
            elif HOST.fullmatch(entry):
                (self._hosts if "." in entry else self._names).add(entry)
            else:
                expected = "neither a host (example.com) nor a file suffix (.pdf) nor regex:PATTERN"
                yield _list_problem(f"{path}:{line_number}", f"{entry!r} is {expected}")

    def __call__(self, document: Document) -> Dropped | None:
        reason = None if document.url is None else self.judge(document.url)
        return None if reason is None else Dropped(reason)

    def judge(self, url: str) -> str | None:
        """Why an address is dropped; None keeps it."""
        try:
            parts = urlsplit(url.strip())
            host = _unicode_host((parts.hostname or "").rstrip("."))
        except ValueError:
            return "no address"
        if parts.scheme not in ("http", "https") or not HOST.fullmatch(host):
            return "no address"
        labels = host.split(".")
        domains = (".".join(labels[at:]) for at in range(len(labels)))
        if any(domain in self._hosts for domain in domains) or _name_of(labels) in self._names:
            return "unwanted host"
        file = unquote(parts.path).lower().rpartition("/")[2][-MAX_NAME:]
        ends = (file[at:] for at, letter in enumerate(file) if letter == ".")
        if any(end in self._suffixes for end in ends):
            return "unwanted kind of file"
        if any(pattern.search(url) for pattern in self._patterns):
            return "unwanted pattern"
        return None


def _list_problem(location: str, reason: str) -> Problem:
    return Problem("invalid-url-blacklist", place=location, reason=reason)


def _unicode_host(host: str) -> str:
    """A host with its internationalized labels in Unicode: `exämple.com` of xn--exmple-cua.com.

    Raises:
        ValueError: If it is too long, or has a label that is not valid.
    """
    if len(host) > MAX_NAME:
        raise ValueError("a host of more than 253 characters")
    if not host.isascii():
        host = unicodedata.normalize("NFKC", host).replace("\u3002", ".").lower()
    if "xn--" not in host:
        return host
    labels = (
        label.removeprefix("xn--").encode().decode("punycode") if label[:4] == "xn--" else label
        for label in host.split(".")
    )
    return ".".join(labels)


def _name_of(labels: list[str]) -> str:
    """The registered name of a host: `example` of www.example.co.uk."""
    if len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in SECOND_LEVEL:
        return labels[-3]
    return labels[-2] if len(labels) > 1 else labels[0]
