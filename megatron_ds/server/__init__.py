"""The text generation server: the program that serves a trained model over HTTP."""
