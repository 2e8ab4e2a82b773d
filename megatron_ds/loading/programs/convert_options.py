"""Options of tools/convert_checkpoint.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds.config.fields import choice_problem, option_field, option_group, when
from megatron_ds.config.options.checkpoint import (
    FORMAT_SYNONYMS,
    FORMATS,
    REFUSED_FORMATS,
    WRITTEN_FORMATS,
    split_location,
)
from megatron_ds.config.problems import Problem
from megatron_ds.conversion.engines.facts import ENGINES
from megatron_ds.conversion.foreign.recognition import location_problems
from megatron_ds.conversion.weights_locations import GGUF_ENDING

MEGATRON_FORMATS = ("megatron", "torch_dist")
MEGATRON = when(target_format=MEGATRON_FORMATS)
format_field = functools.partial(option_field, synonyms=FORMAT_SYNONYMS)
QUANTIZED = "q8_0"
ENGINES_HELP = (
    "Inference engines that must compute this model, separated by commas or spaces, of "
    f"{', '.join(ENGINES)}: what one would refuse or compute differently is an error, and the "
    "output is adapted to them where its model stays the same (default: none; a warning names "
    "engines that would compute another model)."
)
MODEL_TYPES = (
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
    "phi3",
    "deepseek_v3",
    "olmo2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "granite",
    "gpt_neox",
    "bloom",
    "falcon",
    "phi",
    "gptj",
)


@dataclass(frozen=True)
class ModelFlags:
    """Model of a checkpoint whose files do not describe it, as of torchtitan."""

    num_attention_heads: int | None = option_field(None, minimum=1)
    """Number of attention heads."""
    rotary_base: float | None = option_field(None, above=1)
    """Base period of RoPE."""
    norm_epsilon: float | None = option_field(None, above=0)
    """Epsilon of the normalization."""
    use_rope_scaling: bool = option_field(False)
    """RoPE is scaled as in Llama 3.1."""
    rope_scaling_factor: float | None = option_field(None, minimum=1)
    """Factor of --use-rope-scaling."""
    seq_length: int | None = option_field(None, minimum=1)
    """Sequence length in tokens."""
    moe_router_topk: int | None = option_field(None, minimum=1)
    """Number of experts of each token."""
    moe_router_score_function: str | None = option_field(None, choices=("softmax", "sigmoid"))
    """Scores of a token's experts."""
    moe_router_pre_softmax: bool = option_field(False)
    """Experts are weighed by their probabilities among all experts."""
    moe_router_topk_scaling_factor: float | None = option_field(None, above=0)
    """Factor of the weights of the selected experts."""
    moe_router_num_groups: int | None = option_field(None, minimum=1)
    """Number of groups of experts."""
    moe_router_group_topk: int | None = option_field(None, minimum=1)
    """Number of groups that a token's experts are in."""


@dataclass(frozen=True)
class Options:
    """Converts the weights of a checkpoint to another format, on the CPU, one tensor at a time.

    Formats: native, a checkpoint of a run or a folder of weights alone; hf, a model of Hugging
    Face's transformers; gguf, a file of llama.cpp; megatron, a checkpoint of Megatron-LM, as input
    also of Megatron-DeepSpeed; torch_dist, a checkpoint of Megatron Core; universal, weights and
    optimizer states of a run as DeepSpeed's full tensors, as output of checkpoints of this program.
    The output appears complete or not at all. torchtitan, olmo_core and litgpt are other trainers'
    weights. A native output is a folder of weights: --load of a run starts from it, and the server
    loads it, on every layout.
    """

    PROGRAM: ClassVar[str] = "convert_checkpoint.py"

    load: str = option_field("", metavar="FOLDER", required=True)
    """Folder to convert, a URL such as s3://BUCKET/FOLDER, hf:OWNER/NAME on the Hub, or a .gguf
    file."""
    save: str = option_field("", metavar="FOLDER", required=True)
    """New folder of the converted weights; of a gguf output, a new .gguf file."""
    source_format: str = format_field(
        "auto", flag="from", choices=("auto", *FORMATS, *REFUSED_FORMATS)
    )
    """Format of --load."""
    target_format: str = format_field("", flag="to", choices=WRITTEN_FORMATS, required=True)
    """Format of --save."""
    dtype: str | None = option_field(None, choices=("fp32", "bf16", "fp16", QUANTIZED))
    """Type of the weights (default: as they are); q8_0, of a gguf output, has 8 bits with a scale
    of 32 elements each for matrices."""
    hf_model_type: str | None = option_field(
        None, choices=MODEL_TYPES, only_with=when(target_format="hf")
    )
    """model_type of an hf output (default: the original one, else the first that has the parts of
    the model)."""
    engines: tuple[str, ...] = option_field(
        (),
        flag="for",
        nargs="*",
        metavar="ENGINE",
        only_with=when(target_format=("hf", "gguf")),
        help=ENGINES_HELP,
    )
    target_tensor_parallel_size: int = option_field(
        1, aliases=("target-tensor-model-parallel-size",), minimum=1, only_with=MEGATRON
    )
    """tensor-parallel size of the output; native and hf outputs have none."""
    target_pipeline_parallel_size: int = option_field(
        1, aliases=("target-pipeline-model-parallel-size",), minimum=1, only_with=MEGATRON
    )
    """Pipeline stages of the output; native and hf outputs have none."""
    target_expert_parallel_size: int = option_field(
        1,
        aliases=("target-expert-model-parallel-size",),
        minimum=1,
        only_with=when(target_format="megatron"),
    )
    """expert-parallel size of the output; other outputs have none."""
    optimizer_states: bool = option_field(False, only_with=MEGATRON)
    """Convert Adam's states, iteration and consumed samples, too, so that Megatron continues the
    run; by default its output has the weights alone."""
    target_adam: str = option_field(
        "fused", choices=("fused", "torch"), only_with=when(optimizer_states=True)
    )
    """Adam of the Megatron that continues: the one of Transformer Engine or apex, or torch's AdamW,
    which Megatron uses if both are missing."""
    checkpoint_staging_dir: str | None = option_field(None, metavar="FOLDER")
    """Folder for the files of a URL (default: below the folder for temporary files)."""
    verify: bool = option_field(False)
    """Compare the logits of both models for a fixed prompt; of hf, transformers' model."""

    model: ModelFlags = option_group(ModelFlags())
    given: frozenset[str] = frozenset()

    @property
    def source(self) -> tuple[str, Path]:
        """Format and folder; the format may precede the folder."""
        name, folder = split_location(self.load)
        return name if name != "auto" else self.source_format, Path(folder)

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The names in --for."""
        return names_of(self.engines)

    def problems(self) -> Iterator[Problem]:
        yield from location_problems(self.load, self.source_format)
        yield from engine_problems(self.engines, self.target_format)
        if self.target_format == "universal" and self.dtype is not None:
            yield Problem("universal-dtype")
        if self.dtype == QUANTIZED and self.target_format != "gguf":
            yield Problem("quantized-without-gguf")
        if self.dtype == QUANTIZED and self.verify:
            yield Problem("quantized-not-verified")
        if self.target_format == "gguf" and self.save and not self.save.endswith(GGUF_ENDING):
            yield Problem("gguf-file-name", settings=self)


def names_of(entries: Sequence[str]) -> tuple[str, ...]:
    """Names of engines that are separated by commas or spaces."""
    return tuple(dict.fromkeys(name for entry in entries for name in entry.split(",") if name))


def engine_problems(entries: Sequence[str], target_format: str) -> Iterator[Problem]:
    """Yields names that are no engines, and engines that load another format than the output's."""
    for name in names_of(entries):
        engine = ENGINES.get(name)
        if engine is None:
            yield choice_problem("engines", name, tuple(ENGINES))
        elif engine.format != target_format and target_format in ("hf", "gguf"):
            values = {"name": name, "title": engine.title, "format": engine.format}
            yield Problem("engine-format", **values)
