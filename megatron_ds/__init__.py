"""GPT pretraining: Megatron's parallelism trained by DeepSpeed's engines."""

from megatron_ds.version import VERSION as __version__

__all__ = ["__version__"]
