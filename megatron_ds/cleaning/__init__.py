"""Cleaning of text: stages that mend or drop documents, one pipeline over them, its report.

Must not know tokens' files, models or process groups.
"""
