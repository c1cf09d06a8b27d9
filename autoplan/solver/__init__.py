"""The search: rules, placements of an op, of a segment, of a chain, of a job."""
