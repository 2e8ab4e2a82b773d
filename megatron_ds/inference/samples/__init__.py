"""Texts from prompts, or without: the program that writes a trained model's continuations."""
