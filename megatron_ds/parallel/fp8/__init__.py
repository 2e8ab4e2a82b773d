"""Linear layers whose products are of numbers in fp8."""
