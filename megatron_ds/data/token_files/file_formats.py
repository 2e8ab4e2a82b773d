"""Formats of tokens and data other than pairs of `.bin` and `.idx`, and how each is recognized.

The one table of these formats, for every entry that takes such files: `--input`, `--data-path` and
the tools. An entry has the name of its format, the programs that read it, what it holds, and its
signs. A sign is the content where the format has a header or an index; names and files next to it
where the content is bare numbers. Knows no flags and reads no tokens.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron_ds.data.token_files.probed_files import ProbedFile
from megatron_ds.data.token_files.text_columns import Columns, columns_in_head, columns_of_parquet

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
JSON = rb"(?:\xef\xbb\xbf)?\s*[{\[]"
JSON_TEXT = JSON + rb"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]{0,250}(?:\Z|(?<=.{250}))"
NOT_JSON = rb"(?!" + JSON_TEXT + rb")"
"""Ids may begin with the byte of a brace; text has no control characters among its first bytes."""
MAX_LINE_BYTES = 1 << 20
"""Longest JSON line whose keys are read."""


class Holds(Enum):
    """Kind of contents of a format, which decides how its files can be used."""

    IDS = "token ids without text"
    RECORDS = "ids or text, in a container of its program"
    TEXT = "text for preprocessing"
    SAVED_DATASET = "text in a folder, of which only some files count"
    DATASET_CACHE = "copies of the rows of other files"
    PAIR = "a pair .bin and .idx for training"
    POINTER = "the address of a file that is elsewhere"


@dataclass(frozen=True)
class Sign:
    """Rule that recognizes a file of a format. All non-empty attributes must match.

    Attributes:
        part: Text in front of the name of the format, such as "a shard of".
        name: Pattern of its whole name.
        begins: Pattern at its first bytes.
        beside: Name of a file in its folder, with `{name}` for the name of the file and `{stem}`
            for the name without its last suffix.
        beside_begins: Pattern at the first bytes of that file, which must exist in any case.
        accepts: A further condition.
    """

    part: str
    name: str = ""
    begins: bytes = b""
    beside: str = ""
    beside_begins: bytes = b""
    accepts: Callable[[ProbedFile], bool] | None = None

    @property
    def is_of_any_file(self) -> bool:
        """Whether the first bytes alone are the sign."""
        return bool(self.begins) and not (self.name or self.beside or self.accepts)

    def is_of(self, file: ProbedFile) -> bool:
        """Whether a file has the sign."""
        if self.name and not re.fullmatch(self.name, file.name):
            return False
        if self.beside:
            stem = file.name.removesuffix(".gz").rpartition(".")[0] or file.name
            other = file.beside(self.beside.replace("{stem}", stem).replace("{name}", file.name))
            if not (_begins(other, self.beside_begins) if self.beside_begins else other.size >= 0):
                return False
        if self.begins and not _begins(file, self.begins):
            return False
        return self.accepts is None or self.accepts(file)


@dataclass(frozen=True)
class FileFormat:
    """A format.

    Attributes:
        name: Its name, with the program that writes it.
        read_by: Programs that read it.
        holds: Kind of contents.
        signs: Rules that recognize its files.
        import_name: Its name for `--format` of tools/import_tokens.py; "" if that does not read it.
        has_documents: Whether its files have the boundaries of documents.
    """

    name: str
    read_by: str
    holds: Holds
    signs: tuple[Sign, ...]
    import_name: str = ""
    has_documents: bool = True

    def describe(self, sign: Sign) -> str:
        """Describes a file that one of the signs matches, such as "a chunk of a litdata
        dataset"."""
        return f"{sign.part} {self.name}".strip()


class Recognized(NamedTuple):
    """A file whose format is known.

    Attributes:
        file: The file.
        description: Description, such as "a chunk of a litdata dataset".
        format: Its format.
    """

    file: ProbedFile
    description: str
    format: FileFormat


def recognize(
    file: ProbedFile, formats: Iterable[FileFormat] = (), *, by_name: bool = False
) -> Recognized | None:
    """The format of a file; None if it is of no format of the table.

    Args:
        file: The file.
        formats: The formats in question; all by default.
        by_name: Try only signs with a name, which read nothing of most files.
    """
    for format in formats or FORMATS:
        for sign in format.signs:
            if (sign.name or not by_name) and sign.is_of(file):
                return Recognized(file, format.describe(sign), format)
    return None


def most_specific(recognized: Iterable[Recognized]) -> Recognized | None:
    """The recognized file that is most specific about its folder; None without one."""
    return min(recognized, key=lambda one: FORMATS.index(one.format), default=None)


def recognize_head(head: bytes) -> tuple[str, FileFormat] | None:
    """Description and format of a file by its first bytes alone; None if they do not show it."""
    for format in FORMATS:
        for sign in format.signs:
            if sign.is_of_any_file and re.match(sign.begins, head, re.DOTALL):
                return format.describe(sign), format
    return None


def columns_of(file: ProbedFile) -> Columns | None:
    """The columns of a file of JSON lines, Arrow or parquet; None if they cannot be seen."""
    if file.head.startswith(b"PAR1"):
        with suppress(OSError), file.files.open(file.path) as content:
            return columns_of_parquet(content)
        return None
    is_long = re.match(JSON, file.head) and b"\n" not in file.head.strip()
    return columns_in_head(file.files.head(file.path, MAX_LINE_BYTES) if is_long else file.head)


def _begins(file: ProbedFile, pattern: bytes) -> bool:
    return bool(file.head) and re.match(pattern, file.head, re.DOTALL) is not None


def _is_binary(file: ProbedFile) -> bool:
    """Whether a file has bytes that no text has."""
    return b"\0" in file.head or _has_invalid_utf8(file.head)


def _has_invalid_utf8(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end < len(head)  # not a character that the end of the head divides
    return False


def _is_bare(file: ProbedFile) -> bool:
    """Whether a file looks like numbers without a header: it has zero bytes and is not UTF-8."""
    return b"\0" in file.head and _has_invalid_utf8(file.head)


def is_index_without_documents(head: bytes, size: int) -> bool:
    """Whether an index has lengths and offsets only: 12 bytes per sequence after 26 bytes.

    Args:
        head: Its first bytes.
        size: Its bytes.
    """
    if len(head) < 26 or not head.startswith(MAGIC):
        return False
    (sequences,) = struct.unpack_from("<Q", head, 18)
    return bool(size == 26 + 12 * sequences)


def _is_fairseq_index(file: ProbedFile) -> bool:
    return is_index_without_documents(file.head, file.size)


def _begins_with_offsets(file: ProbedFile) -> bool:
    """Whether a file begins with a count n and n + 1 ascending offsets, the first to their end."""
    count = len(file.head) // 4
    if count < 3:
        return False
    numbers = struct.unpack_from(f"<{count}I", file.head)
    offsets = numbers[1 : numbers[0] + 2]
    return bool(offsets[0] == 4 * (numbers[0] + 2)) and list(offsets) == sorted(offsets)


def _begins_with_record(file: ProbedFile) -> bool:
    """Whether a file begins with the length of a TFRecord and the masked CRC-32C of the length."""
    if len(file.head) < 12:
        return False
    checksum = 0xFFFFFFFF
    for byte in file.head[:8]:
        checksum ^= byte
        for _ in range(8):
            checksum = (checksum >> 1) ^ (0x82F63B78 if checksum & 1 else 0)
    checksum ^= 0xFFFFFFFF
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return file.head[8:12] == struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _lacks_text(file: ProbedFile) -> bool:
    """Whether the description of a saved dataset names columns, and none of text."""
    return _begins(file.beside("dataset_info.json"), NO_TEXT)


def _has_fairseq_index(file: ProbedFile) -> bool:
    stem = file.name.rpartition(".")[0]
    return _is_fairseq_index(file.beside(f"{stem}.idx"))


SAVED = rb'.*"_data_files"\s*:'
SAVED_NAMES = r".+\.arrow|state\.json|dataset_info\.json"
SPLITS = "the list of splits of"
SPLITS_HEAD = rb'\s*\{\s*"splits"\s*:'
NO_TEXT = rb'(?=.*"dtype"\s*:)(?!.*"dtype"\s*:\s*"(?:large_)?string")'
MDS_INDEX = rb'\s*\{(?=.*"shards"\s*:\s*\[\s*[{\]])(?=.*"(?:version|column_names|raw_data)")'
LITDATA_INDEX = rb'\s*\{(?=.*"chunks"\s*:\s*\[\s*[{\]])(?=.*"(?:chunk_bytes|config)")'
PACKED = (
    rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd|\xfd7zXZ|BZh\d1AY|PK[\x01-\x08]{2}|\x04\x22\x4d\x18"
    rb"|\x93NUMPY|\xff\xff\xff\xff|ARROW1|PAR1"
)
BARE_NAMES = r"[^.]+|.+\.(?:tok|tokens|ids|dat|data|raw|memmap|mmap|[ui]\d+|u?int\d+)"
TEXT_SUFFIXES = r"\.(?:jsonl|ndjson|json|csv|tsv|txt|text|md)"

PAIR = FileFormat(
    "a pair of token files of Megatron",
    "--data-path",
    Holds.PAIR,
    (
        Sign("the index of", begins=MAGIC),
        Sign("the tokens of", r".+\.bin", NOT_JSON, "{stem}.idx", MAGIC),
    ),
)
BARE_NUMBERS = FileFormat(
    "a token file without a header, as nanoGPT writes",
    "nanoGPT and llama2.c",
    Holds.IDS,
    (
        Sign("", r".+\.bin", rb"(?!" + PACKED + rb")" + NOT_JSON, accepts=_is_binary),
        Sign("", BARE_NAMES, rb"(?!" + PACKED + rb")", accepts=_is_bare),
    ),
    import_name="nanogpt",
    has_documents=False,
)
TEXT_FILE = FileFormat(
    "a file of text or JSON lines",
    "tools/preprocess_data.py",
    Holds.TEXT,
    (
        Sign("", begins=rb'(?:\xef\xbb\xbf)?\s*\{\s*"'),
        Sign("", rf"(?i:.+{TEXT_SUFFIXES}(?:\.(?:gz|bz2|xz|zstd?|lz4))?)"),
    ),
    import_name="jsonl",
)
FORMATS = (
    FileFormat(
        "a Git LFS pointer instead of the file",
        "git lfs pull",
        Holds.POINTER,
        (Sign("", begins=rb"version https://git-lfs\.github\.com/spec/v\d"),),
    ),
    FileFormat(
        "a dataset without text that datasets saved",
        "datasets (load_from_disk)",
        Holds.IDS,
        (
            Sign("a file of", SAVED_NAMES, b"", "state.json", SAVED, _lacks_text),
            Sign(SPLITS, r"dataset_dict\.json", SPLITS_HEAD, "train/dataset_info.json", NO_TEXT),
        ),
        import_name="saved-dataset",
    ),
    FileFormat(
        "a dataset that datasets saved",
        "datasets (load_from_disk)",
        Holds.SAVED_DATASET,
        (
            Sign("a file of", SAVED_NAMES, b"", "state.json", SAVED),
            Sign(SPLITS, r"dataset_dict\.json", SPLITS_HEAD),
        ),
        import_name="saved-dataset",
    ),
    FileFormat(
        "a cache of datasets",
        "datasets (load_dataset)",
        Holds.DATASET_CACHE,
        (
            Sign("a result of map or filter in", r"cache-.+\.arrow", beside="dataset_info.json"),
            Sign("the description of", r"dataset_info\.json", rb'\s*\{.*"features"\s*:'),
        ),
    ),
    FileFormat(
        "a dataset of fairseq or of an old Megatron, lazy or cached (TNTIDX)",
        "fairseq and the fork that wrote it",
        Holds.IDS,
        (
            Sign("the index of", begins=LEGACY_MAGIC),
            Sign("the tokens of", r".+\.bin", NOT_JSON, "{stem}.idx", LEGACY_MAGIC),
        ),
    ),
    FileFormat(
        "a dataset of fairseq, whose index lacks documents",
        "fairseq (--dataset-impl mmap)",
        Holds.IDS,
        (
            Sign("the index of", accepts=_is_fairseq_index),
            Sign("the tokens of", r".+\.bin", NOT_JSON, accepts=_has_fairseq_index),
            Sign("the dictionary of", r"dict(\..+)?\.txt", rb"\S+ \d+\r?\n", "train.idx"),
        ),
    ),
    FileFormat(
        "a token file of llm.c or modded-nanogpt",
        "llm.c and modded-nanogpt",
        Holds.IDS,
        # 20240520 (uint16 tokens) and 20240801 (uint32 tokens), little-endian.
        (Sign("", begins=rb"\x88\xd8\x34\x01|\xa1\xd9\x34\x01"),),
        import_name="llm.c",
        has_documents=False,
    ),
    FileFormat(
        "a packed token file of lit-gpt or TinyLlama",
        "lit-gpt and TinyLlama (PackedDataset)",
        Holds.IDS,
        (Sign("", begins=rb"LITPKDS"),),
    ),
    FileFormat(
        "a token file of datatrove (.ds)",
        "nanotron and datatrove",
        Holds.IDS,
        (
            Sign("", r".+\.ds", NOT_JSON),
            Sign("the document ends of", r".+\.ds\.index", NOT_JSON),
            Sign("the loss mask of", r".+\.ds\.loss", NOT_JSON),
            Sign("the metadata of", r".+\.metadata", rb"[^\n]*\|\d+\n\d+\n"),
            Sign("", "", NOT_JSON, "{name}.metadata", rb"[^\n]*\|\d+\n\d+\n"),
        ),
        import_name="datatrove",
    ),
    FileFormat(
        "a MosaicML streaming dataset (MDS)",
        "streaming and LLM Foundry",
        Holds.RECORDS,
        (
            Sign("a shard of", r".+\.mds(\.\w+)?"),
            Sign("a shard of", "", NOT_JSON + rb'.*\{"column_encodings"\s*:\s*\['),
            Sign("the index of", r"index\.json", MDS_INDEX),
        ),
        import_name="mds",
    ),
    FileFormat(
        "a litdata dataset",
        "litdata and litgpt",
        Holds.RECORDS,
        (
            Sign("the index of", r"index\.json", LITDATA_INDEX),
            Sign("a chunk of", r"chunk-.+\.bin", NOT_JSON, "index.json"),
            Sign("a chunk of", accepts=_begins_with_offsets),
        ),
        import_name="litdata",
    ),
    FileFormat(
        "a Levanter cache",
        "Levanter",
        Holds.IDS,
        (
            Sign("the ledger of", r"shard_ledger\.json"),
            Sign("an array of", r"zarr\.json", rb'\s*\{.*"zarr_format"\s*:'),
        ),
        import_name="levanter",
    ),
    FileFormat(
        "a token file of OLMo-core or dolma (.npy without a header)",
        "OLMo-core and OLMo",
        Holds.IDS,
        (
            Sign("", r".+\.npy", rb"(?!\x93NUMPY)" + NOT_JSON),
            Sign("the document index of", r".+\.csv\.gz", beside="{stem}.npy"),
        ),
        import_name="olmo",
    ),
    FileFormat(
        "a file of torch.save",
        "torch.load",
        Holds.RECORDS,
        (Sign("", begins=rb"PK\x03\x04.{26}[^\x00]{1,200}?/data\.pkl"),),
    ),
    FileFormat(
        "a TFRecord file",
        "TensorFlow, T5 and mesh-transformer-jax",
        Holds.RECORDS,
        (Sign("", accepts=_begins_with_record),),
    ),
    FileFormat(
        "an ArrayRecord file",
        "Grain and MaxText",
        Holds.RECORDS,
        (Sign("", r".+\.array_?record.*", NOT_JSON),),
    ),
    PAIR,
    BARE_NUMBERS,
    FileFormat(
        "a parquet file",
        "tools/preprocess_data.py",
        Holds.TEXT,
        (Sign("", begins=rb"PAR1"),),
        import_name="parquet",
    ),
    FileFormat(
        "an Arrow file",
        "tools/preprocess_data.py",
        Holds.TEXT,
        (Sign("", begins=rb"ARROW1\x00\x00|\xff\xff\xff\xff..\x00\x00"),),
        import_name="arrow",
    ),
    FileFormat(
        "a NumPy array",
        "NumPy and build-nanogpt",
        Holds.IDS,
        (Sign("", begins=rb"\x93NUMPY"),),
        import_name="numpy",
        has_documents=False,
    ),
    FileFormat(
        "a NumPy array",
        "NumPy",
        Holds.IDS,
        (Sign("an archive with", begins=rb"PK\x03\x04.{26}[^/\x00]+\.npy"),),
    ),
    TEXT_FILE,
)
"""All formats in the order in which they are tried, the general ones last."""

FOREIGN_FORMATS = tuple(format for format in FORMATS if format.holds is not Holds.TEXT)
"""The formats that preprocessing does not read."""
