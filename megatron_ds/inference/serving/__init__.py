"""The HTTP server: its APIs, the queue of requests and the metrics."""
