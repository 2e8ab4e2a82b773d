"""Continues a text with an exported checkpoint, with transformers alone.

python examples/use/generate_with_transformers.py exported "Once upon a time"
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer(prompt, return_tensors="pt")
new = model.generate(**ids, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(new[0], skip_special_tokens=True))
