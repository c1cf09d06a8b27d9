"""Plan -> Report rows, and their text, JSON and HTML."""
