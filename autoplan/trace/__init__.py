"""From an ``nn.Module`` to a graph cut into segments: load, trace, lower, segment."""
