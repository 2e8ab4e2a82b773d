"""Preprocessing: documents of any format to Megatron's token files.

The path of a document: `inputs` selects files, `document_readers` opens them and `formats` reads
raw documents; `pipeline` sends chunks of them to the processes of `worker_pool`, where `encoder`
uses `parsing`, `sentence_splitter` (or `sentence_rules`) and a tokenizer; `pipeline` writes the
tokens in order. `options` describes a run, `stage_timer` measures it.
"""
