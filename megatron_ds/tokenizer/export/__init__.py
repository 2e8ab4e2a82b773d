"""Tokenizers of runs as a tokenizer.json, the file of the library `tokenizers`.

One module per kind of file, the check that both give the same ids, and the characters that the
library drops. Must not know folders of models.
"""
