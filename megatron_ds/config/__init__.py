"""The run's frozen configuration: one field declares one knob.

Every field carries its type, default, help text and, where the name alone does not give it, its
Megatron flag. `arguments.py` derives the command line from here; nothing else declares a flag.
`Config.problems()` returns every contradiction at once, in the user's words. This file knows no
torch, no argparse and no environment variable.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from megatron_ds.config.fields import option_field

T = TypeVar("T")

GLU_ACTIVATIONS = ("swiglu", "geglu", "reglu", "liglu")
ACTIVATIONS = ("gelu", "openai-gelu", "squared-relu", *GLU_ACTIVATIONS)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the transformer."""

    num_layers: int | None = option_field(
        None, "number of transformer layers", aliases=("encoder-num-layers",)
    )
    hidden_size: int | None = option_field(None, "width of the residual stream")
    ffn_hidden_size: int | None = option_field(
        None,
        "width inside the MLP (default: 4 x hidden; for --swiglu the multiple of 64 below 8/3 "
        "x hidden)",
    )
    num_attention_heads: int | None = option_field(None, "number of query heads")
    kv_channels: int | None = option_field(None, "size of one head (default: hidden / heads)")
    group_query_attention: bool = option_field(
        False, "grouped-query attention; the groups are --num-query-groups"
    )
    num_query_groups: int | None = option_field(
        None,
        "number of key-value heads (default: as many as query heads)",
        aliases=("num-key-value-heads",),
    )
    seq_length: int | None = option_field(
        None, "tokens per sample", aliases=("encoder-seq-length",)
    )
    max_position_embeddings: int | None = option_field(
        None,
        "rows of the learned position table (default: seq-length); not needed by other positions",
    )
    position_embedding_type: str = option_field(
        "learned_absolute",
        "how positions enter",
        choices=("learned_absolute", "rope", "alibi", "none"),
        values={"absolute": "learned_absolute", "rotary": "rope"},
    )
    rotary_percent: float = option_field(1.0, "share of each head that rope rotates, 0 < x <= 1")
    rotary_base: float = option_field(
        10000.0, "rope's base period", aliases=("rotary-position-embeddings-theta",)
    )
    normalization: str = option_field(
        "LayerNorm",
        "normalisation",
        choices=("LayerNorm", "RMSNorm"),
        values={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_epsilon: float = option_field(
        1e-5, "added to the variance", aliases=("layernorm-epsilon",)
    )
    activation: str = option_field(
        "gelu",
        "MLP activation; the *glu ones gate: act(gate) * up. Also --swiglu, --openai-gelu, "
        "--squared-relu, "
        "--glu-activation X",
        choices=ACTIVATIONS,
    )
    bias_gelu_fusion: bool = option_field(
        True,
        "compute gelu exactly (erf), not with the tanh approximation of the fused kernel of "
        "Megatron",
    )
    untie_embeddings_and_output_weights: bool = option_field(
        False, "give the output layer a weight of its own"
    )
    add_bias_linear: bool = option_field(
        True, "no biases in the linear layers", flag="disable-bias-linear"
    )
    add_qkv_bias: bool = option_field(
        False, "keep the bias of the QKV projection when --disable-bias-linear is given"
    )
    embed_layernorm: bool = option_field(
        False, "normalise the token embedding (before positions are added)"
    )
    attention_dropout: float = option_field(0.1, "dropout probability of the attention weights")
    hidden_dropout: float = option_field(0.1, "dropout probability before each residual addition")
    init_method_std: float = option_field(
        0.02, "standard deviation of initial weights; output layers use it / sqrt(2 x layers)"
    )
    make_vocab_size_divisible_by: int = option_field(
        128, "pad the vocabulary to a multiple of this (and of the tensor-parallel size)"
    )
    vocab_size: int | None = option_field(
        None,
        "number of tokens, for --tokenizer-type NullTokenizer or TikTokenizer (others know theirs)",
    )

    # The properties below are valid once problems() is empty.

    @property
    def layers(self) -> int:
        return required(self.num_layers)

    @property
    def hidden(self) -> int:
        return required(self.hidden_size)

    @property
    def heads(self) -> int:
        return required(self.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden // self.heads

    @property
    def gated(self) -> bool:
        return self.activation in GLU_ACTIVATIONS

    @property
    def ffn(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return max(64, 64 * (8 * self.hidden // 3 // 64))
        return 4 * self.hidden

    @property
    def sequence(self) -> int:
        return required(self.seq_length)

    @property
    def positions(self) -> int:
        return self.max_position_embeddings or self.sequence

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def vocab(self) -> int:
        return required(self.vocab_size)

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding table. The same for every tensor-parallel size that divides the
        padding unit.
        """
        unit = math.lcm(self.make_vocab_size_divisible_by, tp_size)
        return -(-self.vocab // unit) * unit

    def problems(self, tp_size: int) -> Iterator[str]:
        yield from self._range_problems()
        sizes = (self.hidden_size, self.num_attention_heads)
        optional = (self.kv_channels, self.num_query_groups, self.ffn_hidden_size)
        if all(size is not None and size > 0 for size in sizes) and all(
            size is None or size > 0 for size in optional
        ):
            yield from self._shape_problems()
            if tp_size > 1:
                yield from self._tensor_parallel_problems(tp_size)
        if (
            self.position_embedding_type == "learned_absolute"
            and self.seq_length is not None
            and 0 < (self.max_position_embeddings or 0) < self.seq_length
        ):
            yield (
                f"--seq-length {self.seq_length} exceeds --max-position-embeddings "
                f"{self.max_position_embeddings}: learned positions end there (give at most "
                f"{self.max_position_embeddings}, or --max-position-embeddings {self.seq_length})"
            )

    def _range_problems(self) -> Iterator[str]:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            value = getattr(self, name)
            if value is None:
                yield f"{flag_of(name)} is required"
            elif value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
        for name in (
            "kv_channels",
            "num_query_groups",
            "ffn_hidden_size",
            "max_position_embeddings",
            "make_vocab_size_divisible_by",
            "norm_epsilon",
            "rotary_base",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
        for name in ("attention_dropout", "hidden_dropout"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                yield f"{flag_of(name)} {value}: must be at least 0 and below 1"
        if not 0.0 < self.rotary_percent <= 1.0:
            yield f"--rotary-percent {self.rotary_percent}: must be above 0 and at most 1"
        if self.init_method_std < 0:
            yield f"--init-method-std {self.init_method_std}: must not be negative"
        if self.group_query_attention and self.num_query_groups is None:
            yield "--group-query-attention needs --num-query-groups"

    def _shape_problems(self) -> Iterator[str]:
        if self.kv_channels is None and self.hidden % self.heads:
            yield (
                f"--hidden-size {self.hidden} is not divisible by --num-attention-heads "
                f"{self.heads} (nearest: {nearest_multiples(self.hidden, self.heads)}; or give "
                "--kv-channels to choose the head size)"
            )
        else:
            yield from self._rope_problems()
        if self.heads % self.kv_heads:
            yield (
                f"--num-attention-heads {self.heads} is not divisible by --num-query-groups "
                f"{self.num_query_groups} (groups that divide it: {_listed(divisors(self.heads))})"
            )

    def _rope_problems(self) -> Iterator[str]:
        rotated = int(self.head_dim * self.rotary_percent)
        if self.position_embedding_type == "rope" and (rotated % 2 or rotated <= 0):
            yield (
                f"rope rotates pairs: head size {self.head_dim} x --rotary-percent "
                f"{self.rotary_percent} = {rotated} must be even and positive (nearest: "
                f"{nearest_multiples(rotated, 2)})"
            )

    def _tensor_parallel_problems(self, tp_size: int) -> Iterator[str]:
        """Each tensor-parallel rank holds whole heads, whole groups and an equal part of the MLP.

        The vocabulary is no matter: it is padded to a multiple of the tensor-parallel size.
        """
        fitting = [
            size
            for size in divisors(self.heads)
            if self.kv_heads % size == 0 and self.ffn % size == 0
        ]
        for name, value in (
            ("num_attention_heads", self.heads),
            ("num_query_groups", self.num_query_groups),
            ("ffn_hidden_size", self.ffn),
        ):
            if value is None or value % tp_size == 0:
                continue
            derived = getattr(self, name) is None
            origin = f" (from --hidden-size {self.hidden})" if derived else ""
            yield (
                f"{flag_of(name)} {value}{origin} is not divisible by "
                f"--tensor-model-parallel-size {tp_size} (nearest: "
                f"{nearest_multiples(value, tp_size)}; tensor-parallel sizes that fit this model: "
                f"{_listed(fitting)})"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is cut over processes. The data-parallel size is what remains of the world."""

    tensor_model_parallel_size: int = option_field(
        1, "processes that share each layer", aliases=("model-parallel-size",)
    )
    pipeline_model_parallel_size: int = option_field(1, "pipeline stages (only 1 for now)")

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model; 0 if the processes cannot be cut so."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return world_size // (tp * pp) if tp > 0 and pp > 0 and world_size % (tp * pp) == 0 else 0

    def describe_data_parallel_size(self, world_size: int) -> str:
        """How the data-parallel size comes about, for messages."""
        words = f"{_processes(world_size)} / --tensor-model-parallel-size "
        words += f"{self.tensor_model_parallel_size}"
        if self.pipeline_model_parallel_size != 1:
            words += f" / --pipeline-model-parallel-size {self.pipeline_model_parallel_size}"
        return f"{words} = {self.data_parallel_size(world_size)}"

    def problems(self, world_size: int) -> Iterator[str]:
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if tp < 1:
            yield f"--tensor-model-parallel-size {tp}: must be positive"
        elif world_size % tp:
            yield (
                f"--tensor-model-parallel-size {tp} does not divide the {_processes(world_size)} "
                f"of this run (valid: {_listed(divisors(world_size))}; or start "
                f"{nearest_multiples(world_size, tp)} processes)"
            )
        if pp < 1:
            yield f"--pipeline-model-parallel-size {pp}: must be positive"
        elif pp > 1:
            yield (
                f"--pipeline-model-parallel-size {pp}: pipeline parallelism is not there yet; "
                f"use tensor parallelism"
            )


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation checkpointing: what is recomputed in the backward pass instead of stored."""

    checkpoint_activations: bool = option_field(
        False, "recompute whole layers (the forks' name of --recompute-granularity full)"
    )
    checkpoint_num_layers: int = option_field(
        1,
        "layers per recomputed unit; only the unit's input is stored",
        aliases=("recompute-num-layers",),
    )
    recompute_granularity: str | None = option_field(
        None,
        "full: whole layers; selective: the attention core alone",
        choices=("full", "selective"),
    )
    recompute_activations: bool = option_field(
        False, "the same as --recompute-granularity selective"
    )
    deepspeed_activation_checkpointing: bool = option_field(
        False, "recompute with deepspeed.checkpointing"
    )
    partition_activations: bool = option_field(
        False,
        "cut the stored layer inputs over the tensor-parallel ranks (DeepSpeed's)",
        aliases=(
            "distribute-checkpointed-activations",
            "distribute-saved-activations",
        ),
    )
    checkpoint_in_cpu: bool = option_field(
        False, "keep the partitioned inputs in host memory (needs --partition-activations)"
    )
    contigious_checkpointing: bool = option_field(
        False,
        "keep the partitioned inputs in one buffer (needs --partition-activations)",
        aliases=("contiguous-checkpointing",),
    )
    synchronize_each_layer: bool = option_field(
        False, "synchronise the device at each recomputed unit"
    )
    profile_backward: bool = option_field(False, "time the recomputed backward passes")

    @property
    def granularity(self) -> str | None:
        """None, "full" or "selective"."""
        if self.checkpoint_activations or self.recompute_granularity == "full":
            return "full"
        if self.recompute_activations or self.recompute_granularity == "selective":
            return "selective"
        return None

    @property
    def by_deepspeed(self) -> bool:
        return self.granularity == "full" and (
            self.deepspeed_activation_checkpointing or self.partition_activations
        )

    def problems(self, num_layers: int | None = None) -> Iterator[str]:
        if self.checkpoint_num_layers < 1:
            yield f"--checkpoint-num-layers {self.checkpoint_num_layers}: must be positive"
        if num_layers is not None and 0 < num_layers < self.checkpoint_num_layers:
            yield (
                f"--checkpoint-num-layers {self.checkpoint_num_layers} exceeds --num-layers "
                f"{num_layers} (give at most {num_layers})"
            )
        if self.checkpoint_activations and (
            self.recompute_granularity == "selective" or self.recompute_activations
        ):
            yield (
                "--checkpoint-activations recomputes whole layers: it contradicts "
                "--recompute-granularity selective"
            )
        for name in ("checkpoint_in_cpu", "contigious_checkpointing"):
            if getattr(self, name) and not self.partition_activations:
                yield f"{flag_of(name)} needs --partition-activations"
        if self.recompute_granularity == "full" and self.recompute_activations:
            yield "--recompute-granularity full contradicts --recompute-activations (selective)"
        if self.checkpoint_num_layers > 1 and self.granularity != "full":
            yield (
                f"--checkpoint-num-layers {self.checkpoint_num_layers} needs "
                "--checkpoint-activations (or --recompute-granularity full)"
            )
        if self.deepspeed_activation_checkpointing and self.granularity != "full":
            yield (
                "--deepspeed-activation-checkpointing needs --checkpoint-activations "
                "(or --recompute-granularity full)"
            )
        for name in ("synchronize_each_layer", "profile_backward"):
            if getattr(self, name) and not self.by_deepspeed:
                yield f"{flag_of(name)} needs --deepspeed-activation-checkpointing"
        if self.partition_activations and self.granularity != "full":
            yield (
                "--partition-activations needs --checkpoint-activations (or "
                "--recompute-granularity full)"
            )


SPLIT_DATA_FIELDS = ("data_path", "data_args_path")
"""Fields that name data for all parts of a run, which --split cuts."""
PER_SPLIT_DATA_FIELDS = {
    part: (f"{part}_data_path", f"{part}_weighted_split_paths", f"{part}_weighted_split_paths_path")
    for part in ("train", "valid", "test")
}
"""Fields that name the data of one part alone."""


@dataclass(frozen=True)
class DataConfig:
    """Which tokens are read, and in what order."""

    data_path: tuple[str, ...] | None = option_field(
        None,
        "prefix of a .bin/.idx pair, several (each gives according to its size), or WEIGHT PREFIX "
        "WEIGHT PREFIX ...",
        nargs="*",
        metavar="PATH",
    )
    split: str | None = option_field(
        None,
        "shares of --data-path for training, validation, test (default: 969,30,1)",
        metavar="A,B,C",
    )
    train_data_path: tuple[str, ...] | None = option_field(
        None, "as --data-path, for training alone", nargs="*", metavar="PATH"
    )
    valid_data_path: tuple[str, ...] | None = option_field(
        None, "as --data-path, for validation alone", nargs="*", metavar="PATH"
    )
    test_data_path: tuple[str, ...] | None = option_field(
        None, "as --data-path, for the test alone", nargs="*", metavar="PATH"
    )
    data_args_path: str | None = option_field(
        None, "file that holds what --data-path would, separated by white space", metavar="FILE"
    )
    per_split_data_args_path: str | None = option_field(
        None,
        "JSON file with the keys train, valid and test: what --train-, --valid- and "
        "--test-data-path would hold",
        metavar="FILE",
    )
    train_weighted_split_paths: tuple[str, ...] | None = option_field(
        None,
        'training data as one group "NAME: WEIGHT START:END PREFIX, ..."; START:END is the part of '
        "a file's documents, such as 0:0.95",
        nargs="*",
        metavar="GROUP",
    )
    valid_weighted_split_paths: tuple[str, ...] | None = option_field(
        None,
        "validation data as groups of the same form, each evaluated and logged under its name",
        nargs="*",
        metavar="GROUP",
    )
    test_weighted_split_paths: tuple[str, ...] | None = option_field(
        None, "the same for the test", nargs="*", metavar="GROUP"
    )
    train_weighted_split_paths_path: str | None = option_field(
        None, "file that holds --train-weighted-split-paths, each group in quotes", metavar="FILE"
    )
    valid_weighted_split_paths_path: str | None = option_field(
        None, "file that holds --valid-weighted-split-paths, each group in quotes", metavar="FILE"
    )
    test_weighted_split_paths_path: str | None = option_field(
        None, "file that holds --test-weighted-split-paths, each group in quotes", metavar="FILE"
    )
    data_impl: str = option_field(
        "infer",
        "format of the token files; there is one, .bin/.idx pairs that are mapped to memory",
        aliases=("dataset-impl",),
        choices=("mmap", "infer"),
    )
    data_cache_path: str | None = option_field(
        None,
        "folder of the index caches (default: index-cache beside the data, or below --save if "
        "that is read-only)",
        metavar="FOLDER",
    )
    num_workers: int = option_field(2, "loader processes; 0 reads in the training process")
    mmap_warmup: bool = option_field(
        False, "read the token files once at start to warm the page cache"
    )
    reset_position_ids: bool = option_field(
        False, "count positions from 0 again behind each end-of-document token of a sample"
    )
    reset_attention_mask: bool = option_field(
        False,
        "attention within a document only: tokens behind an end-of-document token see none "
        "before it",
    )
    eod_mask_loss: bool = option_field(
        False, "no loss where the input is the end-of-document token"
    )

    def problems(self) -> Iterator[str]:
        whole = [name for name in SPLIT_DATA_FIELDS if getattr(self, name)]
        parts = {
            part: [n for n in names if getattr(self, n)]
            for part, names in PER_SPLIT_DATA_FIELDS.items()
        }
        listed = self.per_split_data_args_path is not None
        both = [name for names in parts.values() for name in names]
        if whole and (both or listed):
            theirs = [*both, *(["per_split_data_args_path"] if listed else [])]
            yield (
                f"{_flags(whole)} cannot go with {_flags(theirs)}: give the data of all parts "
                "together, or of each part alone"
            )
        if len(whole) > 1:
            yield f"{_flags(whole)} exclude each other"
        if listed and both and not whole:
            yield f"--per-split-data-args-path and {_flags(both)} exclude each other"
        for names in parts.values():
            if len(names) > 1:
                yield f"{_flags(names)} exclude each other"
        if not whole and not listed and not parts["train"]:
            yield (
                "--data-path is required (or --train-data-path, --train-weighted-split-paths, "
                "--data-args-path, --per-split-data-args-path)"
            )
        if self.split is not None and not whole:
            yield "--split cuts --data-path; it has no meaning with data of each part alone"
        if self.num_workers < 0:
            yield f"--num-workers {self.num_workers}: must not be negative"
        if self.data_cache_path is not None and not os.path.isdir(self.data_cache_path):
            yield from folder_problems("--data-cache-path", self.data_cache_path)


TOKENIZERS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HFTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model", "tiktoken_pattern"),
    "NullTokenizer": (),
}
"""The kinds of tokenizers and the fields that each needs."""


@dataclass(frozen=True)
class TokenizerConfig:
    """What turns text into ids and back."""

    tokenizer_type: str = option_field(
        "GPT2BPETokenizer",
        "kind of tokenizer",
        choices=tuple(TOKENIZERS),
        values={"PretrainedFromHF": "HFTokenizer", "HuggingFaceTokenizer": "HFTokenizer"},
    )
    vocab_file: str | None = option_field(
        None, "vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece...", metavar="FILE"
    )
    merge_file: str | None = option_field(None, "merges.txt of GPT2BPETokenizer", metavar="FILE")
    tokenizer_model: str | None = option_field(
        None,
        "folder, tokenizer.json or name on the Hugging Face Hub of HFTokenizer; model file of the "
        "SentencePiece kinds and of TikTokenizer",
        aliases=("tokenizer-name-or-path",),
        metavar="PATH",
    )
    trust_remote_code: bool = option_field(
        False, "run the Python code that an HFTokenizer's folder brings; never do so for strangers"
    )
    vocab_extra_ids: int = option_field(
        0, "sentinel tokens <extra_id_N> to add to BertWordPiece... and SentencePieceTokenizer"
    )
    tiktoken_pattern: str | None = option_field(
        None, "how TikTokenizer cuts text into words", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: int = option_field(
        1000, "ids of TikTokenizer before the tokens of its file"
    )
    tiktoken_special_tokens: tuple[str, ...] | None = option_field(
        None,
        "names of the first of these ids; <unk>, <s> and </s> must be among them (default: these)",
        nargs="*",
        aliases=("tokenizer-special-tokens",),
    )

    def problems(self, vocab_size: int | None) -> Iterator[str]:
        kind = self.tokenizer_type
        for name in TOKENIZERS[kind]:
            value = getattr(self, name)
            if value is None:
                yield f"--tokenizer-type {kind} needs {flag_of(name)}"
            elif name == "tiktoken_pattern" or kind == "HFTokenizer":
                continue
            else:
                yield from file_problems(flag_of(name), value)
        if kind == "NullTokenizer" and vocab_size is None:
            yield "--tokenizer-type NullTokenizer needs --vocab-size"
        if vocab_size is not None and vocab_size <= 0:
            yield f"--vocab-size {vocab_size}: must be positive"
        if self.vocab_extra_ids < 0:
            yield f"--vocab-extra-ids {self.vocab_extra_ids}: must not be negative"
        if kind == "TikTokenizer":
            yield from self._special_problems()

    def _special_problems(self) -> Iterator[str]:
        given = " ".join(self.tiktoken_special_tokens or ())
        names = self.tiktoken_special_tokens or ("<unk>", "<s>", "</s>")
        if len(set(names)) != len(names):
            yield f"--tiktoken-special-tokens {given}: a token is given twice"
        if not {"<unk>", "<s>", "</s>"} <= set(names):
            yield f"--tiktoken-special-tokens {given}: must hold <unk>, <s> and </s>"
        if len(names) > self.tiktoken_num_special_tokens:
            yield (
                f"--tiktoken-num-special-tokens {self.tiktoken_num_special_tokens}: must be at "
                f"least {len(names)}, the special tokens that have names"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; weights of one dimension and biases are not decayed."""

    optimizer: str = option_field(
        "adam", "adam is AdamW (decoupled weight decay)", choices=("adam", "sgd")
    )
    lr: float | None = option_field(None, "highest learning rate")
    adam_beta1: float = option_field(0.9, "decay of the first moment")
    adam_beta2: float = option_field(0.999, "decay of the second moment")
    adam_eps: float = option_field(1e-8, "added to the root of the second moment")
    sgd_momentum: float = option_field(0.9, "momentum of sgd")
    weight_decay: float = option_field(0.01, "weight decay")
    start_weight_decay: float | None = option_field(
        None, "weight decay at the start (default: --weight-decay)"
    )
    end_weight_decay: float | None = option_field(
        None, "weight decay at the end (default: --weight-decay)"
    )
    weight_decay_incr_style: str = option_field(
        "constant",
        "course of the weight decay over the run",
        choices=("constant", "linear", "cosine"),
    )
    clip_grad: float = option_field(1.0, "clip the gradient to this global norm; 0 is off")
    calculate_per_token_loss: bool = option_field(
        False,
        "average loss and gradients over all counted tokens of the global batch, instead of the "
        "means of the micro-batches",
    )

    def problems(self) -> Iterator[str]:
        if self.lr is None:
            yield "--lr is required"
        elif self.lr < 0:
            yield f"--lr {self.lr}: must not be negative"
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield f"{flag_of(name)} {getattr(self, name)}: must be at least 0 and below 1"
        if self.adam_eps < 0:
            yield f"--adam-eps {self.adam_eps}: must not be negative"
        if self.clip_grad < 0:
            yield f"--clip-grad {self.clip_grad}: must not be negative (0 is off)"
        bounds = (self.start_weight_decay, self.end_weight_decay)
        if self.weight_decay_incr_style == "constant":
            for name, value in zip(("start", "end"), bounds, strict=True):
                if value is not None and value != self.weight_decay:
                    yield (
                        f"--{name}-weight-decay {value} differs from --weight-decay "
                        f"{self.weight_decay}: choose "
                        "--weight-decay-incr-style linear or cosine"
                    )
        elif None in bounds:
            yield (
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs "
                f"--start-weight-decay and "
                "--end-weight-decay"
            )


SCHEDULE_UNITS = ("iters", "samples", "tokens")
"""In what a length of the schedule can be given."""
SCHEDULE_LENGTHS = {
    "lr_decay": "the decay's length",
    "lr_warmup": "the warm-up's length",
    "lr_wsd_decay": "the length of WSD's last part",
}
"""The lengths of the learning rate's course: a field for each unit."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Batch sizes, the length of the run, and the course of the learning rate."""

    micro_batch_size: int | None = option_field(
        None, "samples per forward pass of one process", aliases=("batch-size",)
    )
    global_batch_size: int | None = option_field(
        None, "samples per optimizer step (default: micro-batch x data-parallel size)"
    )
    rampup_batch_size: tuple[int, int, int] | None = option_field(
        None,
        "START STEP SAMPLES: the first global batch grows by STEP, evenly over SAMPLES samples, to "
        "--global-batch-size",
        nargs=3,
        metavar="N",
    )
    step_batch_size_schedule: tuple[str, ...] | None = option_field(
        None,
        "0:BATCH TOKENS:BATCH ...: the global batch size from each number of consumed tokens on; "
        "K, M, B and T are 1e3, 1e6, 1e9 and 1e12",
        nargs="*",
        metavar="TOKENS:BATCH",
    )
    curriculum_seqlen: tuple[int, int, int] | None = option_field(
        None,
        "START END STEPS: samples are cut to START tokens at first, growing linearly to END tokens "
        "over STEPS iterations; the rest of a cut sample is not trained on",
        nargs=3,
        metavar="N",
    )
    curriculum_seqlen_step: int = option_field(
        8, "the length grows in multiples of this (DeepSpeed's difficulty_step)"
    )
    train_iters: int | None = option_field(None, "length of the run in optimizer steps")
    train_samples: int | None = option_field(None, "length of the run in samples")
    train_tokens: int | None = option_field(
        None,
        "length of the run in tokens: it ends with the step that reaches them (beside "
        "--train-iters or --train-samples: whichever comes first)",
    )
    lr_decay_style: str = option_field(
        "linear",
        "course of the learning rate after warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = option_field(
        None, "iterations until --min-lr is reached (default: --train-iters)"
    )
    lr_decay_samples: int | None = option_field(
        None, "samples until --min-lr is reached (default: --train-samples)"
    )
    lr_decay_tokens: int | None = option_field(
        None, "tokens until --min-lr is reached (default: --train-tokens)"
    )
    lr_warmup_iters: int = option_field(0, "iterations of linear warm-up")
    lr_warmup_samples: int = option_field(0, "samples of linear warm-up")
    lr_warmup_tokens: int | None = option_field(None, "tokens of linear warm-up")
    lr_warmup_fraction: float | None = option_field(
        None, "warm-up as a share of the decay's length, 0 to 1"
    )
    lr_warmup_init: float = option_field(0.0, "learning rate at the start of warm-up")
    min_lr: float = option_field(0.0, "lowest learning rate after warm-up")
    lr_wsd_decay_style: str = option_field(
        "exponential",
        "course of WSD's last part",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = option_field(None, "iterations of WSD's last part")
    lr_wsd_decay_samples: int | None = option_field(None, "samples of WSD's last part")
    lr_wsd_decay_tokens: int | None = option_field(None, "tokens of WSD's last part")

    @property
    def batch_size_steps(self) -> tuple[tuple[int, int], ...]:
        """--step-batch-size-schedule as (tokens, batch size), without entries that are neither."""
        read = map(_batch_size_step, self._batch_size_entries())
        return tuple(entry for entry in read if entry is not None)

    def _batch_size_entries(self) -> list[str]:
        """The words between spaces and commas, however they were quoted."""
        return " ".join(self.step_batch_size_schedule or ()).replace(",", " ").split()

    def problems(self, dp_size: int, arithmetic: str = "") -> Iterator[str]:
        """dp_size: data-parallel size, 0 if it is not known. arithmetic: how that came about, in
        words.
        """
        if self.train_iters is None and self.train_samples is None and self.train_tokens is None:
            yield "--train-iters, --train-samples or --train-tokens is required"
        if self.train_iters is not None and self.train_samples is not None:
            yield (
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples} "
                "exclude each other: both give the run's length"
            )
        for name in (
            "train_iters",
            "train_samples",
            "train_tokens",
            "micro_batch_size",
            "global_batch_size",
            "curriculum_seqlen_step",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
        yield from self._unit_problems()
        if self.lr_warmup_fraction is not None:
            if not 0.0 <= self.lr_warmup_fraction <= 1.0:
                yield f"--lr-warmup-fraction {self.lr_warmup_fraction}: must lie between 0 and 1"
            for name in self.given_lengths("lr_warmup"):
                yield (
                    f"--lr-warmup-fraction {self.lr_warmup_fraction} and {flag_of(name)} "
                    f"{getattr(self, name)} exclude each other: both give the warm-up's length"
                )
        if self.micro_batch_size is None:
            yield "--micro-batch-size is required"
        if self.rampup_batch_size is not None:
            yield from self._rampup_problems(*self.rampup_batch_size)
        if self.step_batch_size_schedule is not None:
            yield from self._step_problems()
        if self.curriculum_seqlen is not None:
            yield from self._curriculum_problems(*self.curriculum_seqlen)
        if self.micro_batch_size is not None and self.micro_batch_size > 0 and dp_size > 0:
            yield from self._batch_problems(self.micro_batch_size, dp_size, arithmetic)

    def given_lengths(self, stem: str) -> list[str]:
        """The fields of a length (train, lr_decay, lr_warmup, lr_wsd_decay) that say something."""
        return [name for unit in SCHEDULE_UNITS if getattr(self, name := f"{stem}_{unit}")]

    def _unit_problems(self) -> Iterator[str]:
        """A run is measured in iterations or in samples, and its schedule with it, or in tokens;
        every length in one unit."""
        wrong, right = None, "samples"
        if self.train_iters is not None and self.train_samples is None:
            wrong, right = "samples", "iters"
        elif self.train_samples is not None and self.train_iters is None:
            wrong, right = "iters", "samples"
        for stem, what in SCHEDULE_LENGTHS.items():
            given = self.given_lengths(stem)
            if len(given) > 1:
                named = " and ".join(f"{flag_of(name)} {getattr(self, name)}" for name in given)
                yield f"{named} exclude each other: both give {what}"
            elif wrong is not None and given == [f"{stem}_{wrong}"]:
                yield (
                    f"{flag_of(given[0])} {getattr(self, given[0])} cannot go with --train-{right}:"
                    f" give {flag_of(f'{stem}_{right}')} instead"
                )
            elif given == [f"{stem}_iters"] and self._changing_batch() is not None:
                yield (
                    f"{flag_of(given[0])} {getattr(self, given[0])} counts steps, whose size "
                    f"{self._changing_batch()} changes: give {flag_of(f'{stem}_samples')} or "
                    f"{flag_of(f'{stem}_tokens')} instead"
                )
        if self.lr_decay_style == "WSD" and not self.given_lengths("lr_wsd_decay"):
            yield f"--lr-decay-style WSD needs --lr-wsd-decay-{right}"

    def _changing_batch(self) -> str | None:
        """The flag by which the batch size changes, if it does."""
        if self.train_iters is not None:
            return None  # told as such
        for name in ("rampup_batch_size", "step_batch_size_schedule"):
            if getattr(self, name) is not None:
                return flag_of(name)
        return None

    def _step_problems(self) -> Iterator[str]:
        """--step-batch-size-schedule in itself, and beside the others that give batch sizes."""
        entries = self._batch_size_entries()
        given = f"--step-batch-size-schedule {' '.join(entries)}"
        if self.rampup_batch_size is not None:
            rampup = " ".join(map(str, self.rampup_batch_size))
            yield (
                f"--rampup-batch-size {rampup} and {given} exclude each other: both give the batch "
                "sizes"
            )
        if self.train_iters is not None:
            yield (
                f"{given} counts tokens: give --train-samples or --train-tokens instead of "
                f"--train-iters {self.train_iters}"
            )
        if not entries:
            yield "--step-batch-size-schedule: give at least one entry, 0:BATCH"
        wrong = [entry for entry in entries if _batch_size_step(entry) is None]
        for entry in wrong:
            yield (
                f"--step-batch-size-schedule: {entry!r} is not TOKENS:BATCH, such as 250B:1536 "
                "(tokens with K, M, B, T or none; a batch of at least 1 sample)"
            )
        if wrong or not entries:
            return
        steps = self.batch_size_steps
        if steps[0][0] != 0:
            yield f"{given}: the first entry must begin at 0 tokens: {entries[0]} does not"
        for number in range(1, len(steps)):
            if steps[number][0] <= steps[number - 1][0]:
                yield (
                    f"{given}: the tokens must rise from entry to entry: {entries[number]} follows "
                    f"{entries[number - 1]}"
                )
        if self.global_batch_size not in (None, steps[-1][1]):
            yield (
                f"--global-batch-size {self.global_batch_size} contradicts {given}, which ends at "
                f"{steps[-1][1]}: leave --global-batch-size out"
            )

    def _curriculum_problems(self, start: int, end: int, steps: int) -> Iterator[str]:
        given, unit = f"--curriculum-seqlen {start} {end} {steps}", self.curriculum_seqlen_step
        if start <= 0 or steps <= 0:
            yield f"{given}: the first length and the iterations must be positive"
        elif start > end:
            yield f"{given}: its first length {start} is above its last, {end}"
        elif unit > 0 and start % unit:
            yield (
                f"{given}: its first length {start} is not a multiple of --curriculum-seqlen-step "
                f"{unit} (nearest: {nearest_multiples(start, unit)})"
            )

    def _rampup_problems(self, start: int, increment: int, samples: int) -> Iterator[str]:
        given = f"--rampup-batch-size {start} {increment} {samples}"
        if self.train_iters is not None:
            yield (
                f"{given} counts samples: give --train-samples instead of --train-iters "
                f"{self.train_iters}"
            )
        if self.global_batch_size is None:
            yield f"{given} needs --global-batch-size, the batch at which it ends"
        if start <= 0 or increment <= 0 or samples < 0:
            yield (
                f"{given}: the first batch and the increment must be positive, the samples not "
                "negative"
            )
        elif self.global_batch_size is not None and start > self.global_batch_size > 0:
            yield (
                f"{given}: its first batch {start} is above --global-batch-size "
                f"{self.global_batch_size}, where it is to end"
            )
        elif self.global_batch_size is not None and (self.global_batch_size - start) % increment:
            below = start + (self.global_batch_size - start) // increment * increment
            yield (
                f"{given}: from {start} in increments of {increment} the batch never is "
                f"--global-batch-size {self.global_batch_size} (nearest: {below} or "
                f"{below + increment})"
            )

    def _batch_problems(self, micro: int, dp_size: int, arithmetic: str) -> Iterator[str]:
        """Every batch size that occurs must fill whole micro-batches on all data-parallel ranks."""
        unit = micro * dp_size
        explained = f"--micro-batch-size {micro} x data-parallel size {dp_size} = {unit}"
        if arithmetic:
            explained += f", with data-parallel size = {arithmetic}"
        for tokens, size in self.batch_size_steps:
            if size % unit:
                yield (
                    f"--step-batch-size-schedule: the batch of {size} from {tokens:,} tokens on is "
                    f"not divisible by {explained} (nearest: {nearest_multiples(size, unit)})"
                )
        if self.batch_size_steps:
            return
        total = self.global_batch_size if self.global_batch_size is not None else unit
        if total > 0 and total % unit:
            yield (
                f"--global-batch-size {total} is not divisible by {explained} (nearest: "
                f"{nearest_multiples(total, unit)})"
            )
        start, increment, samples = self.rampup_batch_size or (unit, unit, 0)
        if start <= 0 or increment <= 0:
            return
        # If the first two batches are divisible, so is their difference, and with it all others.
        for stage, size in enumerate((start, start + increment), 1):
            if size <= total and size % unit:
                yield (
                    f"--rampup-batch-size {start} {increment} {samples}: the batch of {size} "
                    f"(stage {stage} of {(total - start) // increment + 1}) is not divisible by "
                    f"{explained} (nearest: {nearest_multiples(size, unit)}; make the first batch "
                    f"and the increment multiples of {unit})"
                )
                return


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. bf16 and fp16 keep fp32 master weights."""

    fp16: bool = option_field(False, "train in fp16 with loss scaling")
    bf16: bool = option_field(False, "train in bf16")
    loss_scale: float | None = option_field(None, "static loss scale of fp16 (default: dynamic)")
    initial_loss_scale: float = option_field(2.0**16, "first value of the dynamic loss scale")
    min_loss_scale: float = option_field(1.0, "lowest dynamic loss scale")
    loss_scale_window: int = option_field(
        1000, "steps without overflow after which the dynamic loss scale doubles"
    )
    hysteresis: int = option_field(2, "overflows before the dynamic loss scale is halved")
    max_consecutive_skipped_steps: int = option_field(
        50,
        "exit (status 3) after this many consecutive steps with non-finite gradients, or one at "
        "the minimum loss scale; 0 disables",
    )
    accumulate_allreduce_grads_in_fp32: bool = option_field(
        True,
        "accumulate gradients in bf16 or fp16 instead of fp32",
        flag="no-accumulate-allreduce-grads-in-fp32",
    )
    allow_fp16_on_cpu: bool = option_field(
        False, "let fp16 run on a CPU, slowly, for tests and the curious"
    )

    @property
    def name(self) -> str:
        """ "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    def problems(self) -> Iterator[str]:
        if self.fp16 and self.bf16:
            yield "--fp16 and --bf16 exclude each other"
        if self.min_loss_scale < 1 or self.min_loss_scale != int(self.min_loss_scale):
            yield f"--min-loss-scale {self.min_loss_scale}: must be a whole number from 1"
        for name in ("loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
        if self.max_consecutive_skipped_steps < 0:
            yield (
                f"--max-consecutive-skipped-steps {self.max_consecutive_skipped_steps}: must not "
                "be negative (0 disables the limit)"
            )


@dataclass(frozen=True)
class DeepSpeedConfig:
    """DeepSpeed's part. Keys of the --deepspeed_config file fill in where the flags were left at
    their defaults.
    """

    deepspeed: bool = option_field(False, "accepted; every run is a DeepSpeed run")
    deepspeed_config: str | None = option_field(
        None, "JSON file with DeepSpeed's keys", flag="deepspeed_config", metavar="FILE"
    )
    zero_stage: int | None = option_field(
        None,
        "0: nothing cut over data-parallel ranks; 1: optimizer states; 2: and gradients; "
        "3: and parameters (default: 1)",
    )
    cpu_optimizer: bool = option_field(
        False, "keep the optimizer states in host memory (offload_optimizer: cpu)"
    )
    remote_device: str = option_field(
        "none", "where ZeRO-3 keeps the parameters (offload_param)", choices=("none", "cpu", "nvme")
    )

    def problems(self) -> Iterator[str]:
        if self.zero_stage is not None and self.zero_stage not in (0, 1, 2, 3):
            yield f"--zero-stage {self.zero_stage}: must be 0, 1, 2 or 3"
        if self.deepspeed_config is not None:
            yield from file_problems("--deepspeed_config", self.deepspeed_config)


def file_problems(flag: str, path: str) -> Iterator[str]:
    """Why a file cannot be taken; every rank reads it, so that a pipe would not do."""
    if os.path.isdir(path):
        yield f"{flag} {path}: is a folder, not a file"
    elif not os.path.exists(path):
        yield f"{flag} {path}: there is no such file"
    elif not os.path.isfile(path):
        yield f"{flag} {path}: is no regular file, which can be read more than once"


def folder_problems(flag: str, path: str | None) -> Iterator[str]:
    """Why a folder cannot be made or written, without trying it."""
    if path is None:
        return
    existing = os.path.abspath(path)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        yield f"{flag} {path}: {existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{flag} {path}: {existing} cannot be written"


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = option_field(None, "folder for checkpoints", metavar="FOLDER")
    load: str | None = option_field(
        None,
        "folder to resume from; a folder without a checkpoint starts a new run",
        metavar="FOLDER",
    )
    save_interval: int | None = option_field(
        None, "iterations between checkpoints (the last iteration is always saved)"
    )
    keep_last: int | None = option_field(
        None,
        "checkpoints to keep in --save: a new one that is complete removes older ones beyond this "
        "number (default: all)",
    )
    on_save_error: str = option_field(
        "continue",
        "what follows a checkpoint that the disk does not take: training goes on until the next "
        "one, or ends; the last checkpoint of a run always ends it",
        choices=("continue", "exit"),
    )
    ckpt_step: int | None = option_field(
        None, "iteration of the checkpoint to load (default: the newest that is not damaged)"
    )
    on_damaged_checkpoint: str = option_field(
        "fallback",
        "what to do when the newest checkpoint is damaged: load the one before it, or exit",
        choices=("fallback", "error"),
    )
    exit_on_missing_checkpoint: bool = option_field(
        False, "end with an error, instead of starting a new run, if --load holds no checkpoint"
    )

    def problems(self) -> Iterator[str]:
        for name, needed in (
            ("save_interval", "save"),
            ("keep_last", "save"),
            ("ckpt_step", "load"),
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
            if value is not None and getattr(self, needed) is None:
                yield f"{flag_of(name)} needs --{needed}"
        if self.exit_on_missing_checkpoint and self.load is None:
            yield "--exit-on-missing-checkpoint needs --load"
        yield from folder_problems("--save", self.save)
        if self.load is not None:
            folder, name = os.path.split(os.path.normpath(self.load))
            if name.startswith("global_step"):
                yield f"--load {self.load}: give the folder that holds {name}, {folder or '.'}"
            elif os.path.exists(self.load) and not os.path.isdir(self.load):
                yield f"--load {self.load}: is a file; give the folder that holds global_stepN"


@dataclass(frozen=True)
class LoggingConfig:
    """What is reported, how often and where, and when the run ends early."""

    log_interval: int = option_field(100, "iterations between console lines")
    eval_interval: int | None = option_field(1000, "iterations between validations")
    eval_iters: int = option_field(100, "global batches per validation and test; 0 is off")
    skip_train: bool = option_field(
        False, "evaluate on validation and test data, and train nothing"
    )
    exit_interval: int | None = option_field(
        None, "save and end when the iteration is divisible by this"
    )
    exit_duration_in_mins: float | None = option_field(None, "save and end after this many minutes")
    kill_switch_path: str | None = option_field(
        None,
        "save and end when this file exists",
        aliases=("kill-switch-file",),
        metavar="FILE",
    )
    tensorboard_dir: str | None = option_field(
        None, "folder for TensorBoard (default: none is written)", metavar="FOLDER"
    )
    tensorboard_queue_size: int = option_field(1000, "events held back before TensorBoard writes")
    tensorboard_log_interval: int = option_field(1, "iterations between TensorBoard points")
    log_timers_to_tensorboard: bool = option_field(
        False, "log iteration times and throughput to TensorBoard"
    )
    log_batch_size_to_tensorboard: bool = option_field(
        False, "log the global batch size to TensorBoard"
    )
    log_learning_rate_to_tensorboard: bool = option_field(
        True,
        "do not log the learning rate to TensorBoard",
        aliases=("no-log-learnig-rate-to-tensorboard",),
    )
    log_loss_scale_to_tensorboard: bool = option_field(
        True, "do not log the loss scale to TensorBoard"
    )
    log_validation_ppl_to_tensorboard: bool = option_field(
        False, "log the validation perplexity to TensorBoard"
    )
    log_world_size_to_tensorboard: bool = option_field(
        False, "log the number of processes to TensorBoard"
    )
    log_memory_to_tensorboard: bool = option_field(False, "log device memory to TensorBoard")
    log_params_norm: bool = option_field(
        False, "the norm of all parameters on the console line and in TensorBoard"
    )
    metrics_jsonl: str | None = option_field(
        None,
        "one JSON record per step goes here (default: metrics.jsonl in --save; none without "
        "--save)",
        metavar="FILE",
    )

    def problems(self) -> Iterator[str]:
        for name in (
            "log_interval",
            "eval_interval",
            "exit_interval",
            "exit_duration_in_mins",
            "tensorboard_log_interval",
            "tensorboard_queue_size",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
        if self.eval_iters < 0:
            yield f"--eval-iters {self.eval_iters}: must not be negative"
        if self.skip_train and self.eval_iters == 0:
            yield "--skip-train evaluates alone, and --eval-iters 0 leaves nothing to do"
        yield from folder_problems("--tensorboard-dir", self.tensorboard_dir)
        if self.metrics_jsonl is not None and os.path.isdir(self.metrics_jsonl):
            yield f"--metrics-jsonl {self.metrics_jsonl}: is a folder; give a file"
        elif self.metrics_jsonl is not None:
            folder = os.path.dirname(os.path.abspath(self.metrics_jsonl))
            yield from folder_problems(f"--metrics-jsonl {self.metrics_jsonl}: its folder", folder)


@dataclass(frozen=True)
class RuntimeConfig:
    """Processes and kernels."""

    seed: int = option_field(1234, "seed of weights, data order and dropout")
    distributed_backend: str | None = option_field(
        None,
        "communication backend (default: the accelerator's)",
        choices=("nccl", "gloo", "ccl", "hccl"),
    )
    distributed_timeout_minutes: float = option_field(
        10.0, "a collective that waits longer than this many minutes is an error"
    )
    local_rank: int | None = option_field(
        None,
        "set by the launcher; not read, its environment says the same",
        aliases=("local-rank",),
        flag="local_rank",
    )
    compile: bool = option_field(
        False, "compile each layer with torch.compile (head and loss are fused by hand)"
    )

    def problems(self) -> Iterator[str]:
        if not 0 <= self.seed < 1 << 32:
            yield f"--seed {self.seed}: must be at least 0 and below 2^32"
        if self.distributed_timeout_minutes <= 0:
            yield (
                f"--distributed-timeout-minutes {self.distributed_timeout_minutes}: must be "
                "positive"
            )


@dataclass(frozen=True)
class Config:
    """Everything a run is told. Frozen: what changes during a run is in `state.TrainState`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    given: frozenset[str] = frozenset()
    """Names of the fields that the user set, as against those left at their defaults."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where the values of fields come from that no flag set: the DeepSpeed file's key and line."""

    def problems(self, world_size: int) -> list[str]:
        """Every contradiction, a line each, in the user's words; empty if the run can start.

        world_size: number of processes.
        """
        dp_size = self.parallel.data_parallel_size(world_size)
        numbers = [
            f"{flag_of(name)} {value}: must be a finite number"
            for group in self.to_dict().values()
            for name, value in group.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if numbers:
            return numbers
        return [
            *self.model.problems(self.parallel.tensor_model_parallel_size),
            *self.parallel.problems(world_size),
            *self.recompute.problems(self.model.num_layers),
            *self.data.problems(),
            *self.tokenizer.problems(self.model.vocab_size),
            *self.optimizer.problems(),
            *self.schedule.problems(dp_size, self.parallel.describe_data_parallel_size(world_size)),
            *self.precision.problems(),
            *self.deepspeed.problems(),
            *self.checkpoint.problems(),
            *self.logging.problems(),
            *self.runtime.problems(),
        ]

    def with_origin(self, problem: str) -> str:
        """A problem in the words of flags, with the places of those that were not given as such."""
        named = [
            f"{flag_of(name)} is {origin}"
            for name, origin in self.origins.items()
            if re.search(re.escape(flag_of(name)) + r"(?![\w-])", problem)
        ]
        return f"{problem} ({'; '.join(named)})" if named else problem

    def with_vocab(self, vocab_size: int) -> Config:
        """The same run with the tokenizer's number of tokens filled in."""
        return dataclasses.replace(
            self, model=dataclasses.replace(self.model, vocab_size=vocab_size)
        )

    def final_global_batch_size(self, dp_size: int) -> int:
        """Samples per optimizer step once they have stopped changing."""
        steps = self.schedule.batch_size_steps
        if steps:
            return steps[-1][1]
        return self.schedule.global_batch_size or required(self.schedule.micro_batch_size) * dp_size

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by group, for JSON."""
        return {
            group.name: dataclasses.asdict(getattr(self, group.name))
            for group in dataclasses.fields(self)
            if group.name not in ("given", "origins")
        }


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "recompute": RecomputeConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "deepspeed": DeepSpeedConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "runtime": RuntimeConfig,
}
"""Config's fields by name, in the order in which --help shows them."""


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` on both sides of a value that is none, for messages."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def divisors(value: int) -> list[int]:
    small = [number for number in range(1, math.isqrt(value) + 1) if value % number == 0]
    return sorted({*small, *(value // number for number in small)})


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _batch_size_step(entry: str) -> tuple[int, int] | None:
    """`250B:1536` as (250_000_000_000, 1536); None for what is not of that form."""
    form = r"([0-9]{1,18}(?:\.[0-9]{1,12})?)([KMBT]?):([0-9]{1,18})"
    match = re.fullmatch(form, entry.upper())
    if match is None or int(match[3]) < 1:
        return None
    tokens = Fraction(match[1]) * SUFFIXES[match[2]]
    return (int(tokens), int(match[3])) if tokens.denominator == 1 else None


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))


def flag_of(name: str) -> str:
    """The flag that a field's name derives, for messages."""
    for group in GROUPS.values():
        for item in dataclasses.fields(group):
            if item.name == name:
                if item.metadata["flag"]:
                    return f"--{item.metadata['flag']}"
                negative = "no-" if item.default is True else ""
                return f"--{negative}{name.replace('_', '-')}"
    raise KeyError(name)


def _flags(names: list[str]) -> str:
    """Flags of fields, listed: `--a, --b and --c`."""
    *others, last = [flag_of(name) for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def required(value: T | None) -> T:
    """A required value, after problems() was found empty."""
    assert value is not None, "configuration was used before problems() was checked"
    return value
