"""Options of attention: latent vectors, heads and windows, position embeddings."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from megatron_ds.config.checks import nearest_multiples
from megatron_ds.config.fields import (
    ABOVE_ONE,
    ANY_VALUE,
    Decides,
    InPhase,
    exclusive_problem,
    option_field,
    when,
)
from megatron_ds.config.model.architecture import SizesConfig, size_field
from megatron_ds.config.model.layer_pattern import chosen_layers
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

_size = functools.partial(option_field, minimum=1, only_with=when(multi_latent_attention=True))
REFUSED = {
    "add_qkv_bias": False,
    "qk_l2_norm": False,
    "qk_layernorm_scope": "head",
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "head_wise_attn_gate": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
"""Options that need heads with keys and values of their own, and their values without effect."""


@dataclass(frozen=True)
class LatentConfig(SizesConfig):
    """Multi-latent attention."""

    multi_latent_attention: bool = option_field(False)
    """Keys and values of all heads are products of one latent vector of a token, and the heads
    share the rotated part of their keys (MLA); --qk-layernorm normalizes the latent vectors,
    --kv-channels has no effect."""
    q_lora_rank: int | None = _size(None)
    """Size of the queries' latent vector (default: none)."""
    kv_lora_rank: int = _size(32)
    """Size of the latent vector of keys and values."""
    qk_head_dim: int = _size(128)
    """Size of the part of a head's queries and keys without positions."""
    qk_pos_emb_head_dim: int = _size(64)
    """Size of their rotated part."""
    v_head_dim: int = _size(128)
    """Size of a head's values."""

    @property
    def head_dim(self) -> int:
        if not self.multi_latent_attention:
            return super().head_dim
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def rotated_dim(self) -> int:
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else self.head_dim

    def latent_problems(self) -> Iterator[Problem]:
        """Check that attention with latent vectors has rotary positions and no other form."""
        if not self.multi_latent_attention:
            return
        values = vars(self)
        refused = [name for name, value in REFUSED.items() if values[name] != value]
        if values["num_query_groups"] not in (None, self.num_attention_heads):
            refused.append("num_query_groups")
        for name in refused:
            yield exclusive_problem("multi_latent_attention", name)
        if values["position_embedding_type"] not in ("rope", "yarn"):
            yield Problem("latent-attention-without-rope", settings=self)


WINDOW = re.compile(r"\s*[\[(]?\s*(-1|\d+)\s*(,\s*(?:-1|\d+)\s*)?[\])]?\s*")
"""The form of `window_size`."""


@dataclass(frozen=True)
class AttentionConfig(LatentConfig):
    """Heads of attention, and the keys that a token attends to."""

    num_query_groups: int | None = size_field(aliases=("num-key-value-heads",))
    """Number of key-value heads for grouped-query attention (default: --num-attention-heads)."""
    window_size: str | None = option_field(None, aliases=("pre-tockens",), metavar="LEFT,RIGHT")
    """LEFT,RIGHT: a token attends to itself and LEFT tokens before it, -1 for all; RIGHT has no
    effect, because attention is causal. LEFT alone, as in MindSpeed, has no effect if it reaches
    the start of a sequence (default: all)."""
    window_attn_skip_freq: str | None = option_field(
        None, metavar="PATTERN", only_with=when(window_size=ANY_VALUE)
    )
    """Layers without the window: N for every N-th layer, counted from 1, or a list with 0 for these
    layers and 1 for the others, such as ([1]*3+[0])*4."""
    qk_layernorm: bool = option_field(False)
    """Normalize the queries and keys of each head, before they are rotated."""
    qk_layernorm_scope: str = option_field(
        "head", choices=("head", "all-heads"), only_with=when(qk_layernorm=True)
    )
    """What --qk-layernorm normalizes together: the queries, or keys, of each head or of all."""
    qk_l2_norm: bool = option_field(False)
    """Divide the queries and keys of each head by the root of their mean square; no weights."""
    softmax_scale: float | None = option_field(None, above=0)
    """Factor of the attention scores (default: 1 / sqrt(dimension of a head))."""
    attn_logit_softcapping: float | None = option_field(None, above=0, metavar="CAP")
    """Bound of the attention scores, CAP x tanh(score / CAP) (default: no bound)."""
    softmax_type: str = option_field("vanilla", choices=("vanilla", "off-by-one", "learnable"))
    """What the softmax of attention has besides the keys: nothing, the logit 0 (off-by-one), or a
    learned logit of each head (learnable: attention sinks)."""
    attention_output_gate: bool = option_field(False)
    """Multiply each element of the heads' outputs by a gate, sigmoid(x W)."""
    head_wise_attn_gate: bool = option_field(False)
    """Multiply the output of each head by a gate, sigmoid(x W)."""
    attention_dropout: float = option_field(0.1, minimum=0, below=1, decides=Decides.TRAINING)
    """Dropout probability of the attention weights."""

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def window(self) -> int | None:
        """Keys that a token attends to in layers with a window, its own included; None: all."""
        if self.window_size is None:
            return None
        values = WINDOW.fullmatch(self.window_size)
        if values is None:
            raise ValueError
        left = int(values[1])
        is_alone = values[2] is None
        return None if left < 0 or (is_alone and left + 1 >= self.seq_length) else left + 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        pattern = self.window_attn_skip_freq
        layers = range(1, self.num_layers + 1)
        if pattern is None:
            has_window = [True for _ in layers]
        elif pattern.strip().isdecimal():
            has_window = [layer % int(pattern) != 0 for layer in layers]
        else:
            has_window = [*chosen_layers(pattern, self.num_layers)]
        return tuple(self.window if has else None for has in has_window)

    @property
    def window_pattern(self) -> str | None:
        """A list with 1 for each layer with a window, 0 for the others; None without windows."""
        pattern = [int(window is not None) for window in self.windows]
        return str(pattern) if any(pattern) else None

    @property
    def gate_size(self) -> int:
        """Gates of a token."""
        gates_per_head = (
            self.head_dim if self.attention_output_gate else int(self.head_wise_attn_gate)
        )
        return self.num_attention_heads * gates_per_head

    def attention_problems(self) -> Iterator[Problem]:
        """Check the norms of queries and keys, the gates, the window and its pattern."""
        if self.qk_layernorm and self.qk_l2_norm:
            yield exclusive_problem("qk_layernorm", "qk_l2_norm")
        yield from self.latent_problems()
        if self.attention_output_gate and self.head_wise_attn_gate:
            yield exclusive_problem("attention_output_gate", "head_wise_attn_gate")
        try:
            _ = self.window
        except ValueError:
            return (yield Problem("window-malformed", settings=self))
        try:
            _ = self.windows
        except (ValueError, ZeroDivisionError):
            yield Problem("window-pattern-malformed", settings=self, layers=self.num_layers)


ROTARY = ("rope", "yarn")
"""Types of rotary positions."""
ROPE = when(position_embedding_type="rope")
_of_rotary = functools.partial(option_field, only_with=when(position_embedding_type=ROTARY))
_of_yarn = functools.partial(option_field, only_with=when(position_embedding_type="yarn"))


@dataclass(frozen=True)
class PositionConfig(SizesConfig):
    """Position embeddings."""

    position_embedding_type: str = option_field(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "alibi", "none"),
        synonyms={"absolute": "learned_absolute", "rotary": "rope"},
        common=True,
        decides=Decides.ROTATION,
        in_phase=InPhase.REPLACED,
    )
    """Type of position embedding; yarn is rope with the scaling of YaRN."""
    max_position_embeddings: int | None = size_field(
        decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Number of learned position embeddings (default: --seq-length); with --rope-ntk-factor, the
    sequence length before scaling."""
    rotary_percent: float = _of_rotary(1.0, above=0, maximum=1)
    """Fraction of each head that RoPE rotates."""
    rotary_base: float = _of_rotary(
        10000.0,
        aliases=("rotary-position-embeddings-theta",),
        above=1,
        decides=Decides.ROTATION,
        in_phase=InPhase.REPLACED,
    )
    """Base period of RoPE."""
    rotary_base_per_layer: tuple[float, ...] = _of_rotary(
        (), nargs="*", above=1, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Base period of RoPE in each layer (default: --rotary-base)."""
    rotary_interleaved: bool = _of_rotary(False)
    """Rotate each two neighboring dimensions, as GPT-J, instead of the halves of a head."""
    no_rope_freq: str = _of_rotary("0", metavar="PATTERN")
    """Layers without positions: N for every N-th layer, counted from 1, 0 for none, or a list with
    1 for these layers and 0 for the others, such as ([0]*3+[1])*4."""
    rotary_seq_len_interpolation_factor: float = option_field(
        1.0, minimum=1, only_with=ROPE, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Divide the positions of RoPE by this factor."""
    use_rope_scaling: bool = option_field(
        False, only_with=ROPE, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Scale RoPE as Llama 3.1 does, from 8192 tokens."""
    rope_scaling_factor: float = option_field(
        8.0,
        minimum=1,
        only_with=(ROPE, when(use_rope_scaling=True)),
        decides=Decides.ROTATION,
        in_phase=InPhase.REPLACED,
    )
    """Factor of --use-rope-scaling."""
    rope_ntk_factor: float | None = option_field(
        None,
        minimum=1,
        only_with=(ROPE, when(max_position_embeddings=ANY_VALUE)),
        decides=Decides.ROTATION,
        in_phase=InPhase.REPLACED,
    )
    """Factor of dynamic NTK scaling: raise the base of RoPE as far as --seq-length exceeds
    --max-position-embeddings."""
    rotary_scaling_factor: float = _of_yarn(
        1.0, minimum=1, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Factor of YaRN."""
    yarn_original_max_position_embeddings: int | None = _of_yarn(
        None, minimum=1, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Sequence length before the scaling of YaRN."""
    yarn_beta_fast: float = _of_yarn(
        32.0, above=0, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Rotations in this length from which on YaRN keeps a dimension."""
    yarn_beta_slow: float = _of_yarn(
        1.0, above=0, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """Rotations in this length up to which YaRN slows a dimension by its factor."""
    yarn_correction_range_round_to_int: bool = _of_yarn(
        True, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """`--no-yarn-correction-range-round-to-int`: do not round the dimensions between which YaRN
    interpolates."""
    mscale: float = _of_yarn(1.0, minimum=0, decides=Decides.ROTATION, in_phase=InPhase.REPLACED)
    """YaRN multiplies rotated queries and keys by m(--mscale) / m(--mscale-all-dim), where m(x) =
    0.1 x ln(--rotary-scaling-factor) + 1."""
    mscale_all_dim: float = _of_yarn(
        0.0, minimum=0, decides=Decides.ROTATION, in_phase=InPhase.REPLACED
    )
    """See --mscale."""
    rope_scaling_layers: str = option_field(
        "1",
        metavar="PATTERN",
        only_with=(
            when(position_embedding_type=ROTARY),
            when(
                position_embedding_type="yarn",
                rotary_seq_len_interpolation_factor=ABOVE_ONE,
                use_rope_scaling=True,
                rope_ntk_factor=ANY_VALUE,
            ),
        ),
        decides=Decides.ROTATION,
        in_phase=InPhase.REPLACED,
    )
    """Layers whose rotary positions are scaled: N for every N-th layer, counted from 1, or a list
    with 1 for these layers and 0 for the others."""

    @property
    def num_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def is_rotary(self) -> bool:
        return self.position_embedding_type in ROTARY

    @property
    def rotated_size(self) -> int:
        """Dimensions of a head that rope rotates."""
        return int(self.rotated_dim * self.rotary_percent)

    @property
    def rotary_bases(self) -> tuple[float, ...]:
        """The base of each layer, raised by NTK scaling.

        It is the base of dynamic NTK for the sequence length of the run, regardless of the length
        of a sequence, so that keys in a cache keep their rotation.
        """
        bases = self.rotary_base_per_layer or (self.rotary_base,) * self.num_layers
        size = self.rotated_size
        if self.position_embedding_type != "rope" or not self.rope_ntk_factor or size <= 2:
            return bases
        ratio = 1 + self.rope_ntk_factor * max(0.0, self.seq_length / self.num_positions - 1)
        raised = ratio ** (size / (size - 2))
        return tuple(
            base * raised if is_scaled else base
            for base, is_scaled in zip(bases, self.rope_layers["rope_scaling_layers"], strict=True)
        )

    @property
    def rope_scalings(self) -> list[str]:
        """The options that scale rope."""
        if self.position_embedding_type != "rope":
            return ["position_embedding_type"] if self.position_embedding_type == "yarn" else []
        scalings = {
            "rotary_seq_len_interpolation_factor": self.rotary_seq_len_interpolation_factor > 1,
            "use_rope_scaling": self.use_rope_scaling,
            "rope_ntk_factor": self.rope_ntk_factor is not None,
        }
        return [name for name, is_used in scalings.items() if is_used]

    @property
    def rope_patterns(self) -> dict[str, str]:
        """Patterns of layers of a model with rope."""
        scaled = self.rope_scaling_layers if self.rope_scalings else "1"
        patterns = {"no_rope_freq": self.no_rope_freq, "rope_scaling_layers": scaled}
        return patterns if self.is_rotary else {}

    @property
    def rope_layers(self) -> dict[str, tuple[bool, ...]]:
        """Whether each layer matches the pattern, by name of the pattern's option."""
        patterns = self.rope_patterns.items()
        return {name: chosen_layers(text, self.num_layers) for name, text in patterns}

    def rope_problems(self) -> Iterator[Problem]:
        """Check the options of rope."""
        if not self.is_rotary:
            return
        rotated = self.rotated_size
        if rotated % 2 or rotated <= 0:
            yield Problem(
                "odd-rotary-dimension",
                settings=self,
                head_dim=self.rotated_dim,
                rotated=rotated,
                nearest_multiples=nearest_multiples(rotated, 2),
            )
        bases = len(self.rotary_base_per_layer)
        layers = self.num_layers
        if bases not in (0, layers):
            yield Problem("rotary-bases-of-other-layers", settings=self, bases=bases)
        for name, pattern in self.rope_patterns.items():
            try:
                chosen_layers(pattern, layers)
            except ValueError:
                yield Problem("layer-pattern-malformed", name, pattern=pattern, layers=layers)
        if self.position_embedding_type == "yarn":
            if self.yarn_original_max_position_embeddings is None:
                yield Problem("yarn-length-missing")
            if self.yarn_beta_fast <= self.yarn_beta_slow:
                yield Problem("yarn-betas-reversed", settings=self)
            return
        if len(self.rope_scalings) > 1:
            yield exclusive_problem(*self.rope_scalings, reason="each scales the same positions")

    def position_problems(self) -> Iterator[Problem]:
        """Check that a table of positions is not shorter than a sequence."""
        if (
            self.position_embedding_type == "learned_absolute"
            and 0 < (self.max_position_embeddings or 0) < self.seq_length
        ):
            yield Problem("sequence-exceeds-position-embeddings", settings=self)
