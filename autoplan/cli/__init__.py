"""The command line: the only place that prints, and where errors become exit codes."""
