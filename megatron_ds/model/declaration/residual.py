"""The form of a layer: which norms it has, and what is added to the residual stream."""

from __future__ import annotations

from megatron_ds.config import ModelConfig
from megatron_ds.dataclass import dataclass


@dataclass(frozen=True)
class Residual:
    """Addition of a layer's attention and feed-forward layer to the residual stream."""

    pre: bool = True
    """Each reads a norm of the stream."""
    post: bool = False
    """A norm of each one's output is added."""
    scale: float = 1.0
    """Factor of what is added."""
    parallel: bool = False
    """Both read the same norm of the layer's input."""
    separate: bool = False
    """If `parallel`, both read norms of their own of the layer's input."""
    after: bool = False
    """A norm of each sum is the stream."""
    to_norm: bool = False
    """The norm that each reads is added to, instead of the stream."""

    @property
    def norms(self) -> dict[str, bool]:
        """Whether a layer has each norm, by name."""
        has_second = self.pre and (not self.parallel or self.separate)
        after = dict.fromkeys(("attention_post_norm", "mlp_post_norm"), self.post or self.after)
        return {"attention_norm": self.pre, "mlp_norm": has_second, **after}


def residual_form(model: ModelConfig) -> Residual:
    """The form that the options select."""
    position = model.norm_position
    parallel = model.parallel_residual
    return Residual(
        pre=position in ("before", "both"),
        post=position in ("both", "reordered"),
        scale=model.residual_factor,
        parallel=parallel is not None,
        separate=parallel == "separate",
        after=position == "after",
        to_norm=model.apply_residual_connection_post_layernorm,
    )
