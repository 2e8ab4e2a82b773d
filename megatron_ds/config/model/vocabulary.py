"""Options of the embedding table and the output layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import UNSET_INT, option_field
from megatron_ds.config.model.sizes import size_field
from megatron_ds.config.problems import Problem


@dataclass(frozen=True)
class VocabularyConfig:
    """Embedding table and output layer."""

    untie_embeddings_and_output_weights: bool = option_field(False)
    output_layer_bias: bool = option_field(False)
    make_vocab_size_divisible_by: int = option_field(128, minimum=1)
    pad_vocab_size_to: int | None = size_field(aliases=("padded-vocab-size",))
    vocab_size: int = option_field(UNSET_INT, minimum=1)
    softmax_vocab_size: int | None = size_field()
    final_logit_softcapping: float | None = option_field(None, above=0, metavar="CAP")
    z_loss_coeff: float = option_field(0.0, minimum=0)

    @property
    def softmax_rows(self) -> int:
        """Rows of the output layer over which the loss normalizes."""
        return max(self.vocab_size, self.softmax_vocab_size or 0)

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding table.

        All tensor-parallel sizes that divide `make_vocab_size_divisible_by` give the same number.
        """
        unit = math.lcm(self.make_vocab_size_divisible_by, tp_size)
        return -(-self.softmax_rows // unit) * unit

    def padding_problems(self, tp_size: int) -> Iterator[Problem]:
        """Check that the padded vocabulary has room for the vocabulary, as far as it is known."""
        rows = self.pad_vocab_size_to
        if rows and tp_size > 0 and (rows < self.vocab_size or rows % tp_size):
            least = -(-max(rows, self.vocab_size) // tp_size) * tp_size
            yield Problem("padded-vocabulary-misfits", settings=self, tp_size=tp_size, least=least)
