"""Tokenizers of runs as a tokenizer.json, the file of the library `tokenizers`.

One module per kind of file, and the check that both give the same ids. Must not know folders of
models.
"""
