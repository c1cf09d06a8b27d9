"""The answer of a search as data: its types, file form, checks and words."""
