"""Checkpoints of other programs, and folders of weights: one module for each format.

A format reads into, and is written from, a `WeightsSource` of `source.py`: canonical names with
full tensors that are read on demand, and what else is known of the model. Each module has

    is_X(path) -> bool              whether a folder has this format; opens no large file
    open_X(path) -> WeightsSource   names, shapes and settings; raises UserError for parts that the
                                    model lacks, and names each of them
    write_X(source, folder, ...)    writes the source, one tensor at a time

`open_source.py` recognizes the format of a folder. `expected_shapes` of `source.py` gives name and
shape of every parameter of a model: a reader maps each of them to a function that reads the full
tensor (`LazyTensor`), a writer takes each of them.
"""
