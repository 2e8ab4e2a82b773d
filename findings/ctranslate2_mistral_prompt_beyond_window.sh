#!/usr/bin/env bash
# One would guess: a converter that carries the window of a Mistral over computes with it, wherever the tokens come
#        from: a text has the same next token as prompt or as what was generated.
# True:  CTranslate2 4.8.5 is right while it generates token by token, far beyond the window, and for
#        prompts up to the window and one token. In longer prompts the logits are neither those of the
#        window nor those without one, and nothing warns.
# Hurt:  whoever serves a model of Mistral's kind with windows: answers to short questions are right, those to
#        documents longer than the window are not.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet ctranslate2==4.8.5 torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import sys
import ctranslate2, numpy, torch, transformers
from tokenizers import Tokenizer, models
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

shape = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
             initializer_range=0.3)
words = ["<unk>", "<s>", "</s>"] + [f"w{n}" for n in range(3, 64)]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>")),
    unk_token="<unk>", bos_token="<s>", eos_token="</s>")
torch.manual_seed(0)
model = MistralForCausalLM(MistralConfig(**shape, sliding_window=16)).eval()
full = MistralForCausalLM(MistralConfig(**shape, sliding_window=None)).eval()
full.load_state_dict(model.state_dict())
folder = f"{sys.argv[1]}/model"
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
ctranslate2.converters.TransformersConverter(folder).convert(f"{folder}/converted")
engine = ctranslate2.Generator(f"{folder}/converted", compute_type="float32")
ids = torch.randint(3, 64, (1, 64), generator=torch.Generator().manual_seed(1))

def generated(prompt, length):
    return engine.generate_batch([[words[n] for n in prompt]], max_length=length, include_prompt_in_result=False,
                                 return_logits_vocab=True, suppress_sequences=[["</s>"]])[0]

print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__, "window of 16 tokens")
off = {}
with torch.no_grad():
    for length in (8, 17, 32, 48, 64):
        logits = numpy.array(generated(ids[0, :length].tolist(), 1).logits[0][0])
        other = numpy.arange(64) != 2  # the end token is suppressed
        off[length] = [abs(logits - m(ids[:, :length]).logits[0, -1].numpy())[other].max() for m in (model, full)]
        print(f"prompt of {length} tokens: logits differ by {off[length][0]:.1e} from transformers,",
              f"by {off[length][1]:.1e} from the model without a window")
    text = ids[0, :8].tolist()
    text += [words.index(word) for word in generated(text, 56).sequences[0]]
    steps = model(torch.tensor([text])).logits[0, 7:-1]
    steps[:, 2] = -torch.inf
equal = (steps.argmax(-1) == torch.tensor(text[8:])).sum().item()
print(f"56 tokens generated from a prompt of 8: {equal} are the likeliest ones of transformers")
assert off[8][0] < 1e-3 and off[17][0] < 1e-3 and equal == len(text) - 8 == 56, "the behaviour has changed"
assert min(off[length][kind] for length in (32, 48, 64) for kind in (0, 1)) > 0.1, "the behaviour has changed"
PY
