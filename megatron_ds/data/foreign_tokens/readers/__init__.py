"""One module per format of other trainers' tokens, behind the interface of `foreign_file.py`."""
