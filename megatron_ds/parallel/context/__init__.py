"""Context parallelism: who has which tokens, and the exchange of keys and values."""
