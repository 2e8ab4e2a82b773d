"""The ranks of a run: their variables, the process group and the roll call."""
