"""Options of checkpoints."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator

from megatron_ds.config.checks import folder_problems
from megatron_ds.config.fields import ANY_VALUE, Decides, exclusive_problem, option_field, when
from megatron_ds.config.problems import Problem, option
from megatron_ds.dataclass import dataclass

TAG = re.compile("global_step0*([0-9]+)")
"""Names of checkpoints."""
SAVE = when(save=ANY_VALUE)
LOAD = when(load=ANY_VALUE)

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
READ_ONLY = ("nanotron", "neox")
"""Formats of the checkpoints of other trainers that are not written."""
TRAINERS = ("torchtitan", "olmo_core", "litgpt", *READ_ONLY)
"""Formats of the checkpoints of other trainers."""
FORMATS = ("native", "universal", "hf", "megatron", "torch_dist", "gguf", *TRAINERS)
"""Formats that --load can name before the folder, as in hf:FOLDER."""
REFUSED_FORMATS = ("nanochat",)
"""Formats that it can name, too, whose models have parts that do not exist here."""
WRITTEN_FORMATS = tuple(name for name in FORMATS if name not in READ_ONLY)
"""Formats of tools/convert_checkpoint.py --to."""
FORMAT_SYNONYMS = {"huggingface": "hf", "transformers": "hf", "torch-dist": "torch_dist"}


def split_location(load: str) -> tuple[str, str]:
    """The format that a value of --load names, or "auto", and the folder."""
    name, colon, folder = load.partition(":")
    is_named = name in (*FORMATS, *REFUSED_FORMATS)
    return (name, folder) if colon and is_named else ("auto", load)


def is_url(location: str) -> bool:
    """Whether a value of --load or --save names a folder of a store, as in s3://BUCKET/FOLDER."""
    return "://" in split_location(location)[1]


def hub_model(location: str) -> str | None:
    """The model of the Hugging Face Hub that hf:OWNER/NAME names, unless it is a local folder."""
    name, model = split_location(location)
    is_name = name == "hf" and HUB_NAME.fullmatch(model) and not os.path.exists(model)
    return model if is_name else None


def is_remote(location: str) -> bool:
    """Whether a value of --load names a folder of a store, or a model of the Hub."""
    return is_url(location) or hub_model(location) is not None


def missing_folder(location: str) -> Iterator[Problem]:
    """Checks that the folder of a value of --load exists, if it is to be a local one."""
    if location and not is_remote(location) and not os.path.isdir(split_location(location)[1]):
        if split_location(location)[0] == "hf":
            yield Problem("hub-model-without-owner", load=location)
        else:
            yield Problem("load-folder-missing", load=location)


_folder = functools.partial(option_field, None, metavar="FOLDER")
_count = functools.partial(option_field, None, minimum=1)
_of_save = functools.partial(option_field, only_with=SAVE)
_of_load = functools.partial(option_field, only_with=LOAD)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    DECIDES = Decides.OPERATION

    save: str | None = _folder(common=True, decides=Decides.RUN)
    """Output folder for checkpoints, or a URL such as s3://BUCKET/FOLDER."""
    load: str | None = _folder(common=True, decides=Decides.RUN)
    """Folder of checkpoints to resume from; if it has none, training starts from scratch. Or
    weights to start from, in any format of tools/convert_checkpoint.py: hf:FOLDER is a model of
    Hugging Face, hf:OWNER/NAME one on the Hub. Options of the model that are not given are then its
    own. The folder may be a URL such as s3://BUCKET/FOLDER."""
    checkpoint_staging_dir: str | None = _folder()
    """Folder of each host for the files of checkpoints whose --save or --load is a URL; environment
    variables in it are expanded (default: below the folder for temporary files)."""
    local_checkpoint_dir: str | None = _folder(only_with=SAVE, decides=Decides.RUN)
    """Folder on the disk of each node for frequent checkpoints, each with a copy on the next node;
    a run continues from the newest one if it is newer than that of --load. Environment variables in
    it are expanded."""
    local_save_interval: int | None = _count(
        only_with=when(local_checkpoint_dir=ANY_VALUE), decides=Decides.RUN
    )
    """Number of iterations between checkpoints in --local-checkpoint-dir."""
    save_interval: int | None = _count(zero_is_off=True, only_with=SAVE, common=True)
    """Number of iterations between checkpoints; the last iteration is always saved."""
    save_interval_minutes: float | None = _of_save(None, above=0)
    """Also save when this many minutes have passed since the last save began."""
    async_save: bool = _of_save(False)
    """Write checkpoints while training continues, which stops only for a copy of the states to host
    memory; the last checkpoint of a run is written as without this flag."""
    keep_last: int | None = _count(only_with=SAVE)
    """Number of checkpoints to keep in --save; older ones are removed after each complete save
    (default: all)."""
    keep_every: int | None = _count(only_with=when(keep_last=ANY_VALUE))
    """Of the older checkpoints, also keep those of iterations that are multiples of this number."""
    on_save_error: str = option_field("continue", choices=("continue", "exit"))
    """What to do when saving fails: continue training until the next checkpoint, or exit. If the
    final checkpoint fails, the run always exits with an error."""
    ckpt_step: int | None = _count(only_with=LOAD, decides=Decides.RUN)
    """Iteration of the checkpoint to load (default: the one that the file `latest` names)."""
    load_tag: str | None = _of_load(None, metavar="TAG", decides=Decides.RUN)
    """Name of the checkpoint to load, global_stepN, as DeepSpeed's tags; `latest` is ignored."""
    on_damaged_checkpoint: str = option_field("fallback", choices=("fallback", "error"))
    """What to do when the checkpoint to load is damaged: load the one before it, or exit."""
    finetune: bool = _of_load(False, decides=Decides.RUN)
    """Start a new run from the weights of --load: at iteration 0, with new states of the optimizer,
    and with any data."""
    no_load_optim: bool = _of_load(False, decides=Decides.RUN)
    """Load the weights and the progress of the run, but not the states of the optimizer, which may
    be another one."""
    universal_checkpoint: bool = _of_load(False, decides=Decides.RUN)
    """Load the universal checkpoint that the file `latest_universal` names, unless --load has a
    checkpoint of a later iteration. Checkpoints of other layouts need no conversion."""
    no_save_optim: bool = _of_save(False)
    """Save the weights and their fp32 master copy, but not the other states of the optimizer; a run
    then continues with --no-load-optim or --finetune only."""
    reset_iteration: bool = _of_load(False, decides=Decides.RUN)
    """Start a new run from the weights and optimizer states of --load: at iteration 0, with the
    first samples of any data. The position in the learning rate schedule is kept."""
    pretrained_checkpoint: str | None = _folder(decides=Decides.RUN)
    """Folder of weights for --finetune, which is loaded if --load has no checkpoint yet; in any
    format of --load."""
    use_checkpoint_args: bool = _of_load(False, decides=Decides.RUN)
    """Take the options of the model from the checkpoint to load, even over flags, except for given
    ones that a resume may change, such as --seq-length and dropout."""
    override_opt_param_scheduler: bool = _of_load(
        False, flag="override-opt_param-scheduler", aliases=("override-lr-scheduler",)
    )
    """Schedule learning rate and weight decay by the command line, without a warning of what
    differs from the checkpoint."""
    override_rope: bool = _of_load(False, decides=Decides.RUN)
    """Continue with the base and the scaling of rotary positions of the command line, where they
    differ from the checkpoint's, as for longer sequences."""
    use_checkpoint_opt_param_scheduler: bool = _of_load(
        False,
        flag="use-checkpoint-opt_param-scheduler",
        aliases=("use-checkpoint-lr-scheduler",),
        decides=Decides.RUN,
    )
    """Schedule learning rate and weight decay as the run that saved the checkpoint, even over
    flags."""
    exit_on_missing_checkpoint: bool = _of_load(False)
    """Exit with an error if --load has no checkpoint."""

    @property
    def step(self) -> int | None:
        """Iteration of the checkpoint that --ckpt-step or --load-tag names."""
        tag = TAG.fullmatch(self.load_tag or "")
        return self.ckpt_step if tag is None else int(tag[1])

    @property
    def is_new_run(self) -> bool:
        """Whether the run starts at iteration 0, whatever it loads."""
        return self.finetune or self.reset_iteration

    def problems(self) -> Iterator[Problem]:
        """Check that the folders can be used, and that flags do not contradict each other."""
        if self.save is not None and not is_url(self.save):
            yield from folder_problems("save", self.save)
        if self.ckpt_step is not None and self.load_tag is not None:
            yield exclusive_problem("ckpt_step", "load_tag")
        if self.load_tag is not None and TAG.fullmatch(self.load_tag) is None:
            yield Problem("load-tag-of-no-checkpoint", tag=self.load_tag)
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield exclusive_problem(
                "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"
            )
        if self.finetune and self.reset_iteration:
            yield exclusive_problem("finetune", "reset_iteration")
        if self.load is None:
            return
        program, load = split_location(self.load)
        folder, name = os.path.split(os.path.normpath(load))
        is_one = name.startswith("global_step") and not name.endswith("_universal")
        is_one &= program not in TRAINERS  # gpt-neox has folders of this name
        if is_one and not is_url(load):  # a URL's is reported when it is downloaded
            yield Problem("load-is-one-checkpoint", settings=self, name=name, folder=folder or ".")
        elif self.is_new_run and self.save is not None and is_same_path(self.save, load):
            name = "finetune" if self.finetune else "reset_iteration"
            names = (name, "load", "save")
            flag = option(name)
            yield Problem("new-run-in-the-same-folder", *names, settings=self, flag=flag)


def is_same_path(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
