"""Documents of input files: formats, compression, parsing and splitting into sentences."""
