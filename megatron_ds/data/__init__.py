"""Token files, samples and micro-batches: what training reads.

The data flow, in the order of the files:

    token_files/                          pairs of token files
    remote/                               the cache of pairs by URL on the disk of a node
    sample_index, index_cache             which tokens make sample i
    gpt_dataset                           samples of one file
    blend/                                blends of files, and their continuation on resume
    validation                            checks of flags and files
    build_datasets                        train, valid and test
    micro_batches                         batches of one data-parallel rank

Knows no process groups: ranks are integers. Imports no torch, so that preprocessing starts quickly.
"""
