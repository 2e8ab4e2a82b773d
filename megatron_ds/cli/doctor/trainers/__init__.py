"""Keys of other trainers' configuration files: a table of each, and what a table cannot express."""
