"""Tokens of other trainers: their files become pairs .bin and .idx, and are written from them."""
