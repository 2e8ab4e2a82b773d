"""Turn documents into Megatron's token files (.bin and .idx).

They are <prefix>_<key>_document.bin and .idx, or <prefix>_<key>_sentence.bin and .idx with
--split-sentences. With --chat the documents are conversations.
"""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cli.command import table_of
from megatron_ds.cli.progress import progress
from megatron_ds.cli.sharding import ShardOptions, connect_ray
from megatron_ds.config import TokenizerConfig
from megatron_ds.config.fields import option_field, option_group, when
from megatron_ds.config.problems import (
    Problem,
    UserError,
    collect,
    counted,
    raise_if_any,
    user_error,
)
from megatron_ds.launch import environment, output
from megatron_ds.preprocess.documents.conversations import MESSAGES, ConversationReader
from megatron_ds.preprocess.documents.sentence_splitter import SPLITTERS, Splitter, choose_splitter
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import Progress, describe_rejects, preprocess
from megatron_ds.preprocess.shards import Shard, shard_problems
from megatron_ds.programs import start_words
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.chat_template import (
    read_chat_template,
    read_special_tokens,
    read_template_file,
)
from megatron_ds.tokenizer.fast_backend import BACKENDS, REFERENCE, select_backend

IF_SPLIT = when(split_sentences=True)
DEFAULT_KEYS = PreprocessOptions().json_keys


@dataclass(frozen=True)
class SentenceOptions:
    """Sentences, for models such as BERT and T5."""

    split_sentences: bool = option_field(False)
    """Write each sentence as a sequence, to <prefix>_<key>_sentence.bin and .idx."""
    keep_newlines: bool = option_field(False, only_with=IF_SPLIT)
    """Keep the whitespace and line breaks after each sentence."""
    lang: str = option_field("english", metavar="NAME", only_with=IF_SPLIT)
    """Language of the text, as named by nltk."""
    sentence_splitter: str = option_field(SPLITTERS[0], choices=SPLITTERS, only_with=IF_SPLIT)
    """nltk's punkt, which requires its model of the language, or built-in rules."""

    def splitter(self) -> Splitter | None:
        """Raises UserError: If the splitter is not installed or does not know the language."""
        if not self.split_sentences:
            return None
        return choose_splitter(self.lang, self.keep_newlines, self.sentence_splitter)


@dataclass(frozen=True)
class Options:
    """Turns documents into Megatron's token files, <prefix>_<key>_document.bin and .idx.

    The output does not depend on --workers, --chunk-size and --tokenizer-backend. Texts without
    tokens are left out.
    """

    PROGRAM: ClassVar[str] = "preprocess_data.py"

    log_interval: int = option_field(1000, minimum=1)
    """Documents between progress lines if stderr is not a terminal."""
    dataset_impl: str = option_field("mmap", choices=("mmap",))
    """Output format; the legacy formats lazy and cached are not supported."""
    vocab_size: int | None = option_field(None, minimum=1)
    """Number of ids of NullTokenizer or TikTokenizer."""
    tokenizer_backend: str = option_field(BACKENDS[0], choices=BACKENDS)
    """Encoding library of GPT2BPETokenizer and of HFTokenizer with a tokenizer.json; auto uses
    gigatoken or fastokens if it is installed and gives the same ids as tokenizers."""
    run: PreprocessOptions = option_group(PreprocessOptions(workers=environment.available_cores()))
    sentences: SentenceOptions = option_group(SentenceOptions())
    shards: ShardOptions = option_group(ShardOptions())
    tokenizer: TokenizerConfig = option_group(
        TokenizerConfig(), flags={"vocab_file": ("vocab-file", "vocab")}
    )

    def problems(self) -> Iterator[Problem]:
        splitter = None
        problems = list[Problem]()
        with collect(problems):
            splitter = self.sentences.splitter()
        yield from (*problems, *self.preprocess_options(splitter).problems())
        yield from self.tokenizer.problems(self.vocab_size)
        yield from self.shards.problems()
        if self.shards.is_used:
            yield from shard_problems(self.run.inputs)

    def preprocess_options(self, splitter: Splitter | None) -> PreprocessOptions:
        run = self.run
        keys = (MESSAGES,) if run.chat and run.json_keys == DEFAULT_KEYS else run.json_keys
        return dataclasses.replace(run, splitter=splitter, json_keys=keys)


def summary(done: Progress, seconds: float) -> str:
    """Documents so far, and the speed of this run, without the work of an interrupted one. MB/s
    count texts without the structure of their files."""
    seconds = max(seconds, 1e-9)
    before = done.before or Progress()
    documents = done.documents - before.documents
    size = done.text_bytes - before.text_bytes
    return (
        f"Processed {done.documents} documents ({documents / seconds:.0f} docs/s, "
        f"{size / seconds / 1e6:.2f} MB/s)."
    )


def final_report(
    done: Progress, options: PreprocessOptions, seconds: float, library: str
) -> Iterator[str]:
    """Counts, time by stage, rejected documents and output files."""
    before = done.before or Progress()
    if done.seconds:
        yield summary(done, seconds)
        if before.documents:
            yield f"{before.documents} of them before the interruption"
        tokens = (done.tokens - before.tokens) / max(seconds, 1e-9)
        yield f"{counted(done.tokens, 'token')} ({tokens:.0f} tokens/s)"
        yield time_line(done.seconds, seconds, library)
    else:  # nothing was left to do
        yield f"{counted(done.documents, 'document')}, {counted(done.tokens, 'token')}"
    if done.lost_characters:
        yield f"lost: {counted(done.lost_characters, 'character')} that the tokenizer lacks"
    if done.dropped:
        yield f"rejected: {describe_rejects(done)}; listed in {options.quarantine}"
    for key in options.json_keys:
        yield f"{'wrote' if done.seconds else 'in'} {options.prefix(key)}.bin and .idx"


def time_line(parts: Mapping[str, float], seconds: float, library: str) -> str:
    """Time by stage.

    The stages of this process add up to `seconds`; the workers' stages are summed over them.

    Args:
        parts: Seconds by stage.
        seconds: Wall time.
        library: Library that encoded.
    """
    read, waited, wrote = (parts.get(stage, 0.0) for stage in ("reading", "waiting", "writing"))
    parsed, encoded = (parts.get(stage, 0.0) for stage in ("parsing", "encoding"))
    start = max(0.0, seconds - read - waited - wrote)
    split = f", splitting sentences {parts['splitting']:.2f} s" if "splitting" in parts else ""
    return (
        f"time: start {start:.2f} s, reading {read:.2f} s, waiting for workers {waited:.2f} s, "
        f"writing {wrote:.2f} s; all workers together: parsing {parsed:.2f} s{split}, encoding "
        f"by {library} {encoded:.2f} s"
    )


def read_conversations(options: PreprocessOptions, tokenizer: Tokenizer) -> ConversationReader:
    """Reads documents as conversations, by the template of --chat-template or of the tokenizer.

    Raises:
        UserError: If there is no template, or the tokenizer does not name the characters of ids.
    """
    if tokenizer.library() is None:
        raise user_error("chat-tokenizer-unsupported", kind=tokenizer.fingerprint.kind)
    if tokenizer.library().encode_special_tokens:
        raise user_error("chat-tokenizer-splits", folder=tokenizer.folder)
    template = read_chat_template(tokenizer.folder)
    if options.chat_template is not None:
        tokens = read_special_tokens(tokenizer.folder)
        template = read_template_file(options.chat_template, tokens)
    if template is None:
        raise user_error("chat-template-required", folder=tokenizer.folder)
    source = template.source + template.source_with_tools
    if "eos_token" in source and "eos_token" not in template.tokens:
        raise user_error("chat-template-without-end", folder=tokenizer.folder)
    if not template.marks_answers:
        output.print_error(f"WARNING: {Problem('chat-template-without-marks').render()}")
    if "strftime_now" in source:
        output.print_error(f"WARNING: {Problem('chat-template-with-date').render()}")
    added = tokenizer.library().get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    return ConversationReader(template, special, options.inputs.max_document_bytes)


def work(options: Options) -> None:
    start = time.perf_counter()
    splitter = options.sentences.splitter()
    if splitter is not None:
        output.print_error(f"sentences are split by {splitter}")
    if not (options.run.append_eod or options.run.chat):
        output.print_error(f"WARNING: {Problem('append-eod-missing').render()}")
    environment.limit_tokenizer_threads()  # the workers are the parallelism
    tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)
    if tokenizer.adds_bos and not (options.run.prepend_bos or options.run.chat):
        output.print_error(f"WARNING: {Problem('prepend-bos-missing', bos=tokenizer.bos).render()}")
    if tokenizer.lost_characters() is not None:
        output.print_error(f"WARNING: {Problem('tokenizer-loses-characters').render()}")
    library = REFERENCE if options.run.chat else options.tokenizer_backend
    backend = select_backend(tokenizer, library)
    if backend.reason:
        output.print_error(f"encoding is slower than it could be: {backend.reason}")
    settings = options.preprocess_options(splitter)
    if settings.chat:
        reader = read_conversations(settings, tokenizer)
        settings = dataclasses.replace(settings, conversations=reader)
    total = None if options.shards.is_used else settings.inputs.total_bytes()
    with progress("tokenizing", total, options.log_interval) as update:

        def report(counts: Progress) -> None:
            line = summary(counts, time.perf_counter() - start)
            update(counts.documents, counts.input_bytes, line)

        try:
            done = run(options, settings, backend.tokenizer, report)
        except UserError as error:
            if error.problems[-1].code == "output-exists":
                cli.fail(error.problems, table_of(Options))
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                error.add_note("free some space for --output-prefix, and run this command again")
            raise
    if done is None:
        return  # other shards are missing
    with output.ignore_broken_pipe():
        print(*final_report(done, settings, time.perf_counter() - start, backend.library), sep="\n")
    raise_if_any(
        Problem("input-file-without-documents", name=name, listed=settings.quarantine)
        for name in done.unusable
    )


def run(
    options: Options,
    settings: PreprocessOptions,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None],
) -> Progress | None:
    """Preprocess in this process, or by shards. None if other processes have to complete them."""
    shards = options.shards
    part = options.shards.part
    if not shards.is_used:
        return preprocess(settings, tokenizer, report, output.print_error)
    from megatron_ds.launch.ranks import ray_cluster
    from megatron_ds.preprocess import sharded
    from megatron_ds.preprocess.shard_files import settle_count

    if part is not None:
        if not shards.merges:
            ray_cluster.exit_with_task()
        settings = dataclasses.replace(settings, shard=Shard(*part))
        merges = shards.merges
        return sharded.preprocess_shard(
            settings, tokenizer, report, output.print_error, merges=merges
        )
    prefix = settings.output_prefix
    with connect_ray(
        shards, start_words("preprocess"), settings.workers, output.print_error
    ) as ray:
        count = settle_count(prefix, shards.num_shards, ray.count)
        all_shards = sharded.ShardedRun(settings, tokenizer, count)
        return all_shards.complete(ray.run, output.print_error, restart=settings.overwrite)


main = cli.program(Options, work)
