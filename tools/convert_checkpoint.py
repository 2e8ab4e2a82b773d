"""Convert the weights of a checkpoint to another format.

Also has the options of the scripts of other projects that do so; other_names.toml has their names.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cli.progress import tensor_progress
from megatron_ds.config import Config
from megatron_ds.config.fields import no_effect_problem, option_field, option_group, when
from megatron_ds.config.options.checkpoint import (
    FORMAT_SYNONYMS,
    FORMATS,
    missing_folder,
    split_location,
)
from megatron_ds.config.problems import Problem, renaming_fields
from megatron_ds.launch.output import print_error

MEGATRON_FORMATS = ("megatron", "torch_dist")
MEGATRON = when(target_format=MEGATRON_FORMATS)
format_field = functools.partial(option_field, synonyms=FORMAT_SYNONYMS)
SAVERS = {"core": "megatron", "mcore": "megatron", "legacy": "megatron", "llama2_hf": "hf"}
"""Formats in the words of Megatron-LM's script."""
MODEL_TYPES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen3_moe"),
    *(
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
    ),
    *("gpt_neox", "bloom", "falcon", "phi", "gptj"),
)


@dataclass(frozen=True)
class Options:
    """Converts the weights of a checkpoint to another format, on the CPU, one tensor at a time.

    Formats: native, a checkpoint of a run or a folder of weights alone; hf, a model of Hugging
    Face's transformers; megatron, a checkpoint of Megatron-LM, as input also of Megatron-DeepSpeed;
    torch_dist, a checkpoint of Megatron Core; universal, weights and optimizer states of a run
    as DeepSpeed's full tensors, as output of checkpoints of this program. The output folder appears
    complete or not at all. A native output is a folder of weights: --load of a run starts from
    it, and the server loads it, on every layout.
    """

    load: str = option_field(
        "",
        "folder to convert, a URL such as s3://BUCKET/FOLDER, or hf:OWNER/NAME on the Hub",
        metavar="FOLDER",
        required=True,
    )
    save: str = option_field(
        "", "new folder of the converted weights", metavar="FOLDER", required=True
    )
    source_format: str = format_field(
        "auto", "format of --load", flag="from", choices=("auto", *FORMATS)
    )
    target_format: str = format_field(
        "", "format of --save", flag="to", choices=FORMATS, required=True
    )
    dtype: str | None = option_field(
        None, "type of the weights (default: as they are)", choices=("fp32", "bf16", "fp16")
    )
    hf_model_type: str | None = option_field(
        None,
        "model_type of an hf output (default: the original one, else the first that has the parts "
        "of the model)",
        choices=MODEL_TYPES,
        only_with=when(target_format="hf"),
    )
    target_tensor_parallel_size: int = option_field(
        1,
        "tensor-parallel size of the output; native and hf outputs have none",
        aliases=("target-tensor-model-parallel-size",),
        minimum=1,
        only_with=MEGATRON,
    )
    target_pipeline_parallel_size: int = option_field(
        1,
        "pipeline stages of the output; native and hf outputs have none",
        aliases=("target-pipeline-model-parallel-size",),
        minimum=1,
        only_with=MEGATRON,
    )
    target_expert_parallel_size: int = option_field(
        1,
        "expert-parallel size of the output; other outputs have none",
        aliases=("target-expert-model-parallel-size",),
        minimum=1,
        only_with=when(target_format="megatron"),
    )
    optimizer_states: bool = option_field(
        False,
        "convert Adam's states, iteration and consumed samples, too, so that Megatron continues "
        "the run; by default its output has the weights alone",
        only_with=MEGATRON,
    )
    target_adam: str = option_field(
        "fused",
        "Adam of the Megatron that continues: the one of Transformer Engine or apex, or torch's "
        "AdamW, which Megatron uses if both are missing",
        choices=("fused", "torch"),
        only_with=when(optimizer_states=True),
    )
    checkpoint_staging_dir: str | None = option_field(
        None,
        "folder for the files of a URL (default: below the folder for temporary files)",
        metavar="FOLDER",
    )
    verify: bool = option_field(
        False, "compare the logits of both models for a fixed prompt; of hf, transformers' model"
    )

    @property
    def source(self) -> tuple[str, Path]:
        """Format and folder; the format may precede the folder."""
        name, folder = split_location(self.load)
        return name if name != "auto" else self.source_format, Path(folder)

    def problems(self) -> Iterator[Problem]:
        yield from missing_folder(self.load)
        if self.target_format == "universal" and self.dtype is not None:
            yield Problem("universal-dtype")


HIDDEN: dict[str, str | None] = dict.fromkeys(item.name for item in dataclasses.fields(Options))
"""No flags of this program."""
FOLDERS = HIDDEN | {"load": "input-folder", "save": "output-folder"}
"""The flags of the scripts of tools/convert_checkpoint/."""


class Peer:
    """Base of the options of a script of another project."""

    conversion: Options

    @property
    def options(self) -> Options:
        """The options of this program."""
        return self.conversion

    def problems(self) -> Iterator[Problem]:
        yield from self.options.problems()

    def run(self) -> None:
        """The work of the script."""
        convert_checkpoint(self.options)


@dataclass(frozen=True)
class ToMegatron(Peer):
    """Converts the weights of a checkpoint to a release of Megatron-LM."""

    PROGRAM: ClassVar[str] = "deepspeed_to_megatron.py"

    conversion: Options = option_group(
        Options(target_format="megatron"),
        flags=FOLDERS
        | {
            "target_tensor_parallel_size": "target-tp",
            "target_pipeline_parallel_size": "target-pp",
        },
    )


@dataclass(frozen=True)
class ToTransformers(Peer):
    """Converts a checkpoint of a DeepSpeed training to a Hugging Face model, with its tokenizer."""

    PROGRAM: ClassVar[str] = "deepspeed_to_transformers.py"

    conversion: Options = option_group(Options(target_format="hf"), flags=FOLDERS)


@dataclass(frozen=True)
class ToUniversal(Peer):
    """Converts a checkpoint to full tensors of all weights and optimizer states.

    The output can be loaded on every layout, by this program and by DeepSpeed. It appears complete
    or not at all; then the file latest_universal in the same folder names it.
    """

    PROGRAM: ClassVar[str] = "ds_to_universal.py"

    conversion: Options = option_group(Options(target_format="universal"), flags=FOLDERS)


@dataclass(frozen=True)
class MegatronConverter(Peer):
    """Converts the weights of a checkpoint, whose format is detected, to Megatron-LM's or to
    Hugging Face's.
    """

    PROGRAM: ClassVar[str] = "convert.py"
    FIELD_FLAGS: ClassVar[dict[str, str]] = {"target_format": "--saver"}

    saver: str = option_field(
        "megatron", "format of the output", choices=("megatron", "hf"), synonyms=SAVERS
    )
    conversion: Options = option_group(
        Options(target_format="megatron"),
        flags=HIDDEN
        | {
            "load": "load-dir",
            "save": "save-dir",
            "target_tensor_parallel_size": "target-tensor-parallel-size",
            "target_pipeline_parallel_size": "target-pipeline-parallel-size",
            "target_expert_parallel_size": "target-expert-parallel-size",
        },
    )

    @property
    def options(self) -> Options:
        return dataclasses.replace(self.conversion, target_format=self.saver)


@dataclass(frozen=True)
class ToFp32(Peer):
    """Writes the fp32 weights of a checkpoint as safetensors: a folder of full tensors under their
    canonical names.
    """

    PROGRAM: ClassVar[str] = "zero_to_fp32.py"
    FIELD_FLAGS: ClassVar[dict[str, str]] = {"load": "CHECKPOINT_DIR", "save": "OUTPUT_DIR"}

    checkpoint_dir: str = option_field(
        "",
        "a --save folder, or the folder of one checkpoint",
        metavar="CHECKPOINT_DIR",
        positional=True,
        required=True,
    )
    output_dir: str = option_field(
        "", "new folder", metavar="OUTPUT_DIR", positional=True, required=True
    )
    tag: str | None = option_field(
        None, "checkpoint of the folder, such as global_step10 (default: the last one)"
    )
    conversion: Options = option_group(Options(target_format="native", dtype="fp32"), flags=HIDDEN)

    @property
    def options(self) -> Options:
        load = str(Path(self.checkpoint_dir, self.tag or "")) if self.checkpoint_dir else ""
        return dataclasses.replace(self.conversion, load=load, save=self.output_dir)


@dataclass(frozen=True)
class HfOptions:
    """Input and output of the conversion."""

    hf_ckpt_dir: str | None = option_field(
        None,
        "folder of the Hugging Face model; with --to-hf-ckpt it is not needed",
        metavar="FOLDER",
    )
    load: str | None = option_field(
        None,
        "checkpoint to convert to a Hugging Face model",
        metavar="FOLDER",
        only_with=when(to_hf_ckpt=True),
    )
    save: str = option_field("", "new folder of the result", metavar="FOLDER", required=True)
    to_hf_ckpt: bool = option_field(False, "convert --load to a Hugging Face model")
    load_mode: str = option_field(
        "auto",
        "ignored; the format of the Hugging Face model is detected automatically",
        choices=("torchbin", "safetensor", "auto"),
    )
    hf_ckpt_num_shards: int | None = option_field(
        None, "ignored; the files are counted automatically", minimum=1
    )


@dataclass(frozen=True)
class HfToMegads(Peer):
    """Converts a Hugging Face model to a folder of weights that --load of a training and of the
    server accepts on every layout, or, with --to-hf-ckpt, a checkpoint to a Hugging Face model.

    Flags of pretrain_gpt.py are accepted and have no effect: both formats describe the model.
    """

    PROGRAM: ClassVar[str] = "hf2megads_weight_converter.py"
    PEERS: ClassVar[str] = "pretrain_gpt"

    training: Config = option_group(Config(), hidden=True)
    given: frozenset[str] = frozenset()
    converter: HfOptions = option_group(HfOptions())

    @property
    def options(self) -> Options:
        flags = self.converter
        load, target = (flags.load, "hf") if flags.to_hf_ckpt else (flags.hf_ckpt_dir, "native")
        return Options(load=load or "", save=flags.save, target_format=target)

    def problems(self) -> Iterator[Problem]:
        name = "load" if self.converter.to_hf_ckpt else "hf_ckpt_dir"
        if not self.options.load:
            yield Problem("required", name)
        with renaming_fields(load=name):
            yield from self.options.problems()

    def warnings(self) -> Iterator[Problem]:
        names = vars(self.converter).keys()
        if others := sorted(self.given - names):
            yield no_effect_problem(*others, reason="on a conversion")


def convert_checkpoint(options: Options) -> None:
    # torch takes seconds to import.
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints a warning
        from megatron_ds.conversion import registry
        from megatron_ds.conversion.convert import verify, with_training
        from megatron_ds.conversion.native import DTYPES
        from megatron_ds.conversion.source import ReadOptions, WriteOptions
        from megatron_ds.loading.locations import staged_location

    start = time.perf_counter()
    location = staged_location(options.load, options.checkpoint_staging_dir, print_error)
    name, folder = dataclasses.replace(options, load=location).source
    has_states = options.optimizer_states and options.target_format in MEGATRON_FORMATS
    reading = ReadOptions(print_error, optimizer=has_states, masters=options.dtype == "fp32")
    source = registry.open_source(folder, name, reading)
    if has_states:
        source = with_training(source)
    source = source.to(None if options.dtype is None else DTYPES[options.dtype])
    target = Path(options.save)
    writing = WriteOptions(
        options.hf_model_type,
        tp_size=options.target_tensor_parallel_size,
        pp_size=options.target_pipeline_parallel_size,
        ep_size=options.target_expert_parallel_size,
        adam=options.target_adam,
        warn=print_error,
    )
    total = source.nbytes
    with tensor_progress("converting", total) as tensors:
        registry.write(
            source, target, options.target_format, writing, lambda name, size: tensors.add(size)
        )
    seconds = max(time.perf_counter() - start, 1e-9)
    print(
        f"{source.format} to {options.target_format}: {tensors.count} tensors, "
        f"{total / 1e6:.1f} MB in {seconds:.1f} s ({total / 1e6 / seconds:.1f} MB/s)"
    )
    if options.verify:
        error = verify(source, target, options.target_format)
        print(f"verified: the logits of both models differ by {error:.1e} of the largest one")
    print(f"wrote {target}")


main = cli.program(Options, convert_checkpoint)

if __name__ == "__main__":
    start_tool.run(main)
