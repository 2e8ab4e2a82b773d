"""Options of checkpoints."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import folder_problems
from megatron_ds.config.fields import ANY_VALUE, exclusive_problem, option_field, when
from megatron_ds.config.problems import Problem, option

TAG = re.compile("global_step0*([0-9]+)")
"""Names of checkpoints."""
SAVE = when(save=ANY_VALUE)
LOAD = when(load=ANY_VALUE)

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
FORMATS = ("native", "universal", "hf", "megatron", "torch_dist")
"""Formats that --load can name before the folder, as in hf:FOLDER."""
FORMAT_SYNONYMS = {"huggingface": "hf", "transformers": "hf", "torch-dist": "torch_dist"}


def split_location(load: str) -> tuple[str, str]:
    """The format that a value of --load names, or "auto", and the folder."""
    name, colon, folder = load.partition(":")
    return (name, folder) if colon and name in FORMATS else ("auto", load)


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

    save: str | None = _folder()
    load: str | None = _folder()
    checkpoint_staging_dir: str | None = _folder()
    local_checkpoint_dir: str | None = _folder(only_with=SAVE)
    local_save_interval: int | None = _count(only_with=when(local_checkpoint_dir=ANY_VALUE))
    save_interval: int | None = _count(zero_is_off=True, only_with=SAVE)
    save_interval_minutes: float | None = _of_save(None, above=0)
    async_save: bool = _of_save(False)
    keep_last: int | None = _count(only_with=SAVE)
    keep_every: int | None = _count(only_with=when(keep_last=ANY_VALUE))
    on_save_error: str = option_field("continue", choices=("continue", "exit"))
    ckpt_step: int | None = _count(only_with=LOAD)
    load_tag: str | None = _of_load(None, metavar="TAG")
    on_damaged_checkpoint: str = option_field("fallback", choices=("fallback", "error"))
    finetune: bool = _of_load(False)
    no_load_optim: bool = _of_load(False)
    universal_checkpoint: bool = _of_load(False)
    no_save_optim: bool = _of_save(False)
    reset_iteration: bool = _of_load(False)
    pretrained_checkpoint: str | None = _folder()
    use_checkpoint_args: bool = _of_load(False)
    override_opt_param_scheduler: bool = _of_load(
        False, flag="override-opt_param-scheduler", aliases=("override-lr-scheduler",)
    )
    override_rope: bool = _of_load(False)
    use_checkpoint_opt_param_scheduler: bool = _of_load(
        False, flag="use-checkpoint-opt_param-scheduler", aliases=("use-checkpoint-lr-scheduler",)
    )
    exit_on_missing_checkpoint: bool = _of_load(False)

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
        load = split_location(self.load)[1]
        folder, name = os.path.split(os.path.normpath(load))
        is_one = name.startswith("global_step") and not name.endswith("_universal")
        if is_one and not is_url(load):  # a URL's is reported when it is downloaded
            yield Problem("load-is-one-checkpoint", settings=self, name=name, folder=folder or ".")
        elif self.is_new_run and self.save is not None and is_same_path(self.save, load):
            name = "finetune" if self.finetune else "reset_iteration"
            names, flag = (name, "load", "save"), option(name)
            yield Problem("new-run-in-the-same-folder", *names, settings=self, flag=flag)
        elif os.path.exists(load) and not os.path.isdir(load):
            yield Problem("load-is-a-file", settings=self)


def is_same_path(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
