"""What a run needs beside its flags, looked at before anything of it exists.

Owns the checks that take a look at the machine and at files: number formats, tokenizer, data and
the checkpoint to load; and the remarks on flags that do nothing beside others. It writes nothing,
knows no process group, and loads torch only for a tokenizer that needs it, when all else is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds import schedules
from megatron_ds.checkpoint.metadata import REPLACED, find_damage, resume_conflicts
from megatron_ds.checkpoint.selection import SelectionPolicy, list_folder, select_checkpoint
from megatron_ds.config import TOKENIZERS, Config, flag_of
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.validation import data_problems, data_warnings
from megatron_ds.launch import device
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.huggingface import needs_transformers


def check(config: Config, world_size: int, warn: Callable[[str], None]) -> list[str]:
    """Every reason why the run could not start or go on that its flags alone do not show.

    config: may hold contradictions; what depends on them is not judged. warn: called with one line
    per remark on settings that are sound and do nothing.
    """
    dp_size = config.parallel.data_parallel_size(world_size)
    sound = not config.problems(world_size) and not [*schedules.problems(config, dp_size)]
    for line in [
        *ineffective_flags(config),
        *(schedules.warnings(config, dp_size) if sound else ()),
    ]:
        warn(line)
    problems = list(_precision_problems(config))
    tokenizer_problems, tokenizer = _tokenizer(config, sound)
    problems += tokenizer_problems
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    identity = None if tokenizer is None else tokenizer.fingerprint
    samples = schedules.planned_samples(config, dp_size) if sound else None
    problems += data_problems(config.data, samples, vocab_size, identity)
    if not problems:
        for line in data_warnings(config.data, None if tokenizer is None else tokenizer.eod):
            warn(line)
    if sound:
        problems += _checkpoint_problems(config, dp_size, vocab_size)
    return problems


@dataclass(frozen=True)
class IneffectiveFlags:
    """Fields that do nothing where `when` holds."""

    fields: tuple[str, ...]
    when: Callable[[Config], bool]
    reason: str


def _of_tokenizers(fields: tuple[str, ...], *kinds: str) -> IneffectiveFlags:
    """Fields that only these kinds of tokenizers read."""
    return IneffectiveFlags(
        fields,
        lambda config: config.tokenizer.tokenizer_type not in kinds,
        f"without --tokenizer-type {' or '.join(kinds)}",
    )


WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")
IDLE = (
    IneffectiveFlags(
        (
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "allow_fp16_on_cpu",
        ),
        lambda config: not config.precision.fp16,
        "without --fp16",
    ),
    IneffectiveFlags(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda config: config.precision.fp16 and config.precision.loss_scale is not None,
        "beside --loss-scale, which is static",
    ),
    IneffectiveFlags(
        ("accumulate_allreduce_grads_in_fp32",),
        lambda config: config.precision.name == "fp32",
        "without --bf16 or --fp16",
    ),
    IneffectiveFlags(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda config: config.optimizer.optimizer != "adam",
        "with --optimizer sgd",
    ),
    IneffectiveFlags(
        ("sgd_momentum",),
        lambda config: config.optimizer.optimizer != "sgd",
        "with --optimizer adam",
    ),
    IneffectiveFlags(
        (
            "lr_wsd_decay_style",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
            "lr_wsd_decay_tokens",
        ),
        lambda config: config.schedule.lr_decay_style != "WSD",
        "without --lr-decay-style WSD",
    ),
    IneffectiveFlags(
        ("curriculum_seqlen_step",),
        lambda config: config.schedule.curriculum_seqlen is None,
        "without --curriculum-seqlen",
    ),
    IneffectiveFlags(
        ("min_lr",),
        lambda config: config.schedule.lr_decay_style == "constant",
        "with --lr-decay-style constant",
    ),
    _of_tokenizers(("vocab_file",), "GPT2BPETokenizer", *WORDPIECE),
    _of_tokenizers(("merge_file",), "GPT2BPETokenizer"),
    _of_tokenizers(
        ("tokenizer_model",),
        *(kind for kind, needs in TOKENIZERS.items() if "tokenizer_model" in needs),
    ),
    _of_tokenizers(("trust_remote_code",), "HFTokenizer"),
    _of_tokenizers(("vocab_extra_ids",), *WORDPIECE, "SentencePieceTokenizer"),
    _of_tokenizers(
        ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"),
        "TikTokenizer",
    ),
    IneffectiveFlags(
        ("rotary_percent", "rotary_base"),
        lambda config: config.model.position_embedding_type != "rope",
        "without --position-embedding-type rope",
    ),
    IneffectiveFlags(
        ("reset_position_ids",),
        lambda config: config.model.position_embedding_type in ("alibi", "none"),
        "without --position-embedding-type learned_absolute or rope",
    ),
    IneffectiveFlags(
        ("bias_gelu_fusion",),
        lambda config: config.model.activation != "gelu",
        "without --activation gelu",
    ),
    IneffectiveFlags(
        ("add_qkv_bias",),
        lambda config: config.model.add_bias_linear,
        "without --disable-bias-linear",
    ),
    IneffectiveFlags(
        (
            "tensorboard_queue_size",
            "tensorboard_log_interval",
            "log_timers_to_tensorboard",
            "log_batch_size_to_tensorboard",
            "log_learning_rate_to_tensorboard",
            "log_loss_scale_to_tensorboard",
            "log_validation_ppl_to_tensorboard",
            "log_world_size_to_tensorboard",
            "log_memory_to_tensorboard",
        ),
        lambda config: config.logging.tensorboard_dir is None,
        "without --tensorboard-dir",
    ),
)


def ineffective_flags(config: Config) -> Iterator[str]:
    """Flags that were given and do nothing beside the others, a line each."""
    for idle in IDLE:
        given = [flag_of(name) for name in idle.fields if name in config.given]
        if given and idle.when(config):
            have = "has" if len(given) == 1 else "have"
            yield f"{', '.join(given)} {have} no effect {idle.reason}"


def _precision_problems(config: Config) -> Iterator[str]:
    precision = config.precision
    if precision.fp16 and not precision.allow_fp16_on_cpu and device.known_without_fp16():
        yield device.fp16_error("this CPU")


def _tokenizer(config: Config, sound: bool) -> tuple[list[str], Tokenizer | None]:
    """What is wrong with the tokenizer, and the tokenizer if it could be built.

    A tokenizer whose library takes seconds to load is built only if all flags are right.
    """
    options, given = config.tokenizer, config.model.vocab_size
    if list(options.problems(given)):
        return [], None  # Config.problems() tells
    slow = options.tokenizer_type == "HFTokenizer" and (
        options.trust_remote_code or needs_transformers(options.tokenizer_model or "")
    )
    if slow and not sound:
        return [], None
    try:
        tokenizer = build_tokenizer(options, given)
    except (ValueError, OSError) as error:
        return [str(error).replace("\n", " ")], None
    size = tokenizer.vocab_size
    if options.tokenizer_type != "NullTokenizer" and given not in (None, size):
        return [
            f"--vocab-size {given}: the tokenizer's vocabulary has {size} ids; leave the flag out"
        ], tokenizer
    return [], tokenizer


def _checkpoint_problems(config: Config, dp_size: int, vocab_size: int | None) -> Iterator[Problem]:
    """Why the checkpoint to load does not fit; its tensors are checked when it is loaded."""
    if config.checkpoint.load is None:
        return
    folder = Path(config.checkpoint.load)
    try:
        listing = list_folder(folder)
        if any(folder.glob(f"{REPLACED}*")):
            return  # an interrupted save, which the load repairs first
        policy = SelectionPolicy.of(config.checkpoint)
        found = select_checkpoint(listing, policy, find_damage, warn=lambda problem: None)
    except UserError as error:
        yield from error.problems
        return
    if found is not None:
        # Without a tokenizer, which is a problem of its own, the vocabulary is not compared.
        vocab: Any = found.run.config["model"].get("vocab_size")
        config = config.with_vocab(vocab if vocab_size is None else vocab_size)
        yield from resume_conflicts(found, config, dp_size)
