"""File utilities: atomic writes, file locks, memory maps and resumable output."""
