"""Streams a continuation from a server, with OpenAI's client.

python examples/use/stream.py 127.0.0.1:5000 "Once upon a time"
"""

import sys

from openai import OpenAI

address, prompt = sys.argv[1:]
client = OpenAI(base_url=f"http://{address}/v1", api_key="none")
model = client.models.list().data[0].id
print(prompt, end="")
for event in client.completions.create(
    model=model, prompt=prompt, max_tokens=32, temperature=0, stream=True
):
    print(event.choices[0].text, end="", flush=True)
print()
