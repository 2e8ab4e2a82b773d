"""Reads how other programs are started: shell scripts, and the configuration files of trainers."""
