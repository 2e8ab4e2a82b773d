"""Parameters whose weights the Trainer decays."""

from types import SimpleNamespace

from frame import verdict
from transformers import MistralConfig, MistralForCausalLM, Trainer

if __name__ == "__main__":
    model = MistralForCausalLM(
        MistralConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=23,
        )
    )
    decayed = Trainer.get_decay_parameter_names(SimpleNamespace(), model)
    norms = [name for name, value in model.named_parameters() if value.ndim == 1]
    wrong = [name for name in norms if name in decayed]
    verdict(bool(wrong), f"the weights of {len(wrong)} of {len(norms)} RMSNorms decay")
