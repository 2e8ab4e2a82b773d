"""Options of the scripts of other projects that convert checkpoints.

tools/other_names.toml has the names of the scripts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds.config import Config
from megatron_ds.config.fields import no_effect_problem, option_field, option_group, when
from megatron_ds.config.problems import Problem, renaming_fields
from megatron_ds.loading.programs.convert import convert_checkpoint
from megatron_ds.loading.programs.convert_options import ModelFlags, Options

SAVERS = {"core": "megatron", "mcore": "megatron", "legacy": "megatron", "llama2_hf": "hf"}
"""Formats in the words of Megatron-LM's script."""
HIDDEN: dict[str, str | None] = dict.fromkeys(
    item.name for cls in (Options, ModelFlags) for item in dataclasses.fields(cls)
)
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

    saver: str = option_field("megatron", choices=("megatron", "hf"), synonyms=SAVERS)
    """Format of the output."""
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

    checkpoint_dir: str = option_field("", metavar="CHECKPOINT_DIR", positional=True, required=True)
    """A --save folder, or the folder of one checkpoint."""
    output_dir: str = option_field("", metavar="OUTPUT_DIR", positional=True, required=True)
    """New folder."""
    tag: str | None = option_field(None)
    """Checkpoint of the folder, such as global_step10 (default: the last one)."""
    conversion: Options = option_group(Options(target_format="native", dtype="fp32"), flags=HIDDEN)

    @property
    def options(self) -> Options:
        load = str(Path(self.checkpoint_dir, self.tag or "")) if self.checkpoint_dir else ""
        return dataclasses.replace(self.conversion, load=load, save=self.output_dir)


@dataclass(frozen=True)
class HfOptions:
    """Input and output of the conversion."""

    hf_ckpt_dir: str | None = option_field(None, metavar="FOLDER")
    """Folder of the Hugging Face model; with --to-hf-ckpt it is not needed."""
    load: str | None = option_field(None, metavar="FOLDER", only_with=when(to_hf_ckpt=True))
    """Checkpoint to convert to a Hugging Face model."""
    save: str = option_field("", metavar="FOLDER", required=True)
    """New folder of the result."""
    to_hf_ckpt: bool = option_field(False)
    """Convert --load to a Hugging Face model."""
    load_mode: str = option_field("auto", choices=("torchbin", "safetensor", "auto"))
    """ignored; the format of the Hugging Face model is detected automatically."""
    hf_ckpt_num_shards: int | None = option_field(None, minimum=1)
    """ignored; the files are counted automatically."""


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
