"""Folders of checkpoints: claiming, locking and checking them, on shared file systems too."""
