"""Parts of a mixture of experts: the router, and the experts' products."""
