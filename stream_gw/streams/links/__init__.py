"""Links with which somebody else watches one stream."""
