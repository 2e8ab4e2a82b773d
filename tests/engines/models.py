"""Small models of every family with a tokenizer of their own, exported for the engines."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from megatron_ds.conversion.engines.checks import Export
from megatron_ds.conversion.engines.facts import ENGINES, SPECIAL_TOKENS, Fact, facts_of
from megatron_ds.conversion.gguf.read_write import write_gguf
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.huggingface.tokenizer import TokenizerFiles
from megatron_ds.conversion.huggingface.written_config import config_of
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.huggingface import SIDE_FILES
from tests.fork_server import REPOSITORY
from tests.tables import tables
from tests.unit.conversion.hf_models import EAGER, randomize
from tests.unit.conversion.models import model_of

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (row[0], row[1]) for name, row in tables(__file__)["models"].items()
}
"""Class and arguments of the configuration by name."""
END = "<|endoftext|>"
ROWS = 512
"""Tokens of the vocabulary."""
TOKENS = 128
"""Tokens whose log probabilities are compared."""
NEW = 8
"""Tokens that are generated."""
SCALE = 0.15
"""Factor of random matrices, with which probabilities are neither equal nor all 0 or 1."""
TEXT = (REPOSITORY / "LICENSE").read_text(encoding="utf-8").partition("Definitions.")[2].strip()
"""Text of the tokenizer and of the prompts, which does not change."""


def family_of(name: str) -> str:
    """The family of a model."""
    return name.partition("-")[0]


def write_tokenizer(folder: Path) -> None:
    """Trains a byte-level BPE with GPT-2's regular expression on the text."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ROWS,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@dataclass(frozen=True)
class Exported:
    """A model with its exports."""

    name: str
    source: SourceCheckpoint
    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        config = self.source.settings.tokenizer_config
        assert config is not None
        return build_tokenizer(config)

    @cached_property
    def ids(self) -> list[int]:
        """The tokens that are compared."""
        return self.tokenizer.encode(TEXT)[:TOKENS]

    @property
    def prompt(self) -> str:
        """A text that is continued."""
        return self.tokenizer.decode(self.ids[:12])

    @cached_property
    def model(self) -> Any:
        return model_of(self.source)

    @cached_property
    def log_probabilities(self) -> Tensor:
        """Log probabilities of this program, [tokens, vocabulary]."""
        return self._logits(self.ids).log_softmax(-1)

    @cached_property
    def continuation(self) -> tuple[str, float]:
        """The text of the most probable tokens after the prompt, up to an end token, and the
        smallest difference of log probabilities between one of them and the next best."""
        ids = self.tokenizer.encode(self.prompt)
        start = len(ids)
        margin = math.inf
        while len(ids) < start + NEW:
            best, second = self._logits(ids)[-1].log_softmax(-1).topk(2)[0].tolist()
            margin = min(margin, best - second)
            chosen = int(self._logits(ids)[-1].argmax())
            if chosen == 0:
                break
            ids = [*ids, chosen]
        return self.tokenizer.decode(ids[start:]), margin

    def _logits(self, ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([ids]))[0, :, :ROWS]
        return logits

    @cached_property
    def export(self) -> Export:
        family, values = config_of(self.source, None)
        return Export(family, values, self.source.settings, False, False)

    def facts(self, engine: str) -> list[Fact]:
        """The facts of an engine that hold for the model, once it was adapted."""
        facts = facts_of(engine, self.export.family, self.export.properties)
        return [fact for fact in facts if not fact.adapt]

    def written(self, engine: str) -> Path:
        """The file or folder that an engine loads, adapted to it where that is possible.

        Raises:
            UserError: If this program refuses to write the file.
        """
        if ENGINES[engine].format == "gguf":
            path = self.folder / "model.gguf"
            if not path.exists():
                write_gguf(self.source, path)
            return path
        path = self.folder / "hf"
        if not path.exists():
            write_hf(self.source, path)
        facts = facts_of(engine, self.export.family, self.export.properties)
        if not any(fact.adapt == SPECIAL_TOKENS for fact in facts):
            return path
        adapted = self.folder / SPECIAL_TOKENS
        if not adapted.exists():
            shutil.copytree(path, adapted)
            files = {
                name: (path / name).read_bytes() for name in SIDE_FILES if (path / name).exists()
            }
            for name, content in TokenizerFiles(files).with_special_tokens().files.items():
                (adapted / name).write_bytes(content)
        return adapted


def exported(name: str, folder: Path, tokenizer: Path) -> Exported:
    """A model with random weights.

    Args:
        name: Its name in models.yaml.
        folder: New folder of its exports.
        tokenizer: Folder of the tokenizer.
    """
    family, arguments = MODELS[name]
    config = getattr(transformers, family)(
        **{**arguments, "vocab_size": ROWS, "bos_token_id": None, "eos_token_id": 0}
        | ({"pad_token_id": None} if "n_embd" not in arguments else {})
    )
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    randomize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SCALE)
        if family_of(name).startswith("gemma"):
            for key, parameter in model.named_parameters():
                if key.endswith("norm.weight"):
                    parameter.sub_(1)  # of which the family adds 1
    model.save_pretrained(folder / "transformers")
    source = open_hf(folder / "transformers")
    settings = dataclasses.replace(
        source.settings,
        tokenizer={"tokenizer_type": "HFTokenizer", "tokenizer_model": str(tokenizer)},
        published={},
        special_ids={"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None},
        generation={},
    )
    return Exported(name, dataclasses.replace(source, settings=settings), folder)
