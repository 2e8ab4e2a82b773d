"""The loggers that a run can write to, and the files of its records and events."""
