"""Tables of published runs: read, laid out as plans, priced, and held against what was measured."""
