"""The training program: the loop, its evaluation and what it reports."""
