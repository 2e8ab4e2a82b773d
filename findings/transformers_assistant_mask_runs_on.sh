#!/usr/bin/env bash
# One would guess: apply_chat_template with return_assistant_tokens_mask=True marks the tokens between {% generation %}
#        and {% endgeneration %}, whatever the tokenizer does with the characters at their edges.
# True:  in transformers 5.23.0, where the last character of an answer has no token, as a line end has none in
#        tokenizers that drop white space, the mask runs on to the end of the conversation: all later messages of the
#        user are marked, too. There is no warning. The last answer of a conversation looks right.
# Hurt:  whoever trains on conversations of several turns with such a tokenizer, and a template whose answers end with
#        a line end inside of the marks: the model also learns to write the user's messages.
set -euo pipefail
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
HF_HUB_OFFLINE=1 "$work/env/bin/python" - 2>"$work/log" <<'PY' || { cat "$work/log"; exit 1; }
from importlib.metadata import version
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["<unk>", "hello", "there", "good", "bye", "<user>", "<assistant>", "<end>"]
library = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<unk>"))
library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
library.add_special_tokens([AddedToken(word, special=True) for word in words[5:]])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<end>")
template = """{% for message in messages %}{% if message.role == 'assistant' %}<assistant> {% generation %}{{
message.content }}<end>LINE{% endgeneration %}{% else %}<user> {{ message.content }}<end>LINE{% endif %}{% endfor %}"""
said = ["hello", "there", "good bye", "bye"]
messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
print(*(f"{name} {version(name)}" for name in ("transformers", "tokenizers")))
masks = {}
for name, line in (("a line end after the end token", "\n"), ("none", "")):
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=template.replace("LINE", line), return_assistant_tokens_mask=True, return_dict=True)
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    masks[line] = encoded["assistant_masks"]
    print(f"{name}: marked are", *(token for token, mark in zip(tokens, masks[line]) if mark))
assert masks[""] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1], "the behaviour has changed"
assert masks["\n"] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], "the behaviour has changed"
PY
