"""What several programs of the museum share beside `frame`."""
